"""Models converted by tools of onnx, with all that these lose put back: other opsets, no functions, dense weights."""

import re
from contextlib import suppress
from copy import deepcopy
from itertools import chain, starmap
from zlib import crc32

import numpy as np
import onnx.inliner
import onnx.shape_inference
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, parser

from onnxq.errors import ModelError
from onnxq.graph.base import RANDOM_OPS
from onnxq.graph.index import find_opset
from onnxq.graph.light import keep_weights
from onnxq.graph.load import check_structure
from onnxq.graph.names import assign_names, choose_name, list_names, name_nodes
from onnxq.graph.scopes import (
    collect_names,
    declare_opset,
    keep_named,
    label_node,
    list_declared,
    list_defined,
    rename_items,
    rename_tensors,
    replace_items,
    walk_all_graphs,
    walk_all_nodes,
    walk_graphs,
    walk_nodes,
)
from onnxq.graph.shapes import set_contrib_apart
from onnxq.graph.storage import copy_fields, omit_weights, restore_weights
from onnxq.graph.values import decode_sparse, encode_tensor

_SPARSE = "sparse_value"


@keep_weights
def store_densely(proto: ModelProto) -> ModelProto:
    """The model itself without sparse weights, else a copy in which they are dense: initializers and Constant nodes.

    Functions must be inlined. Raises ModelError for a sparse tensor that is damaged or too large to be dense.
    """
    if not any(
        graph.sparse_initializer or any(map(_is_sparse, graph.node))
        for _, graph in walk_graphs(proto.graph)
    ):
        return proto
    out = deepcopy(proto)
    for _, graph in walk_graphs(out.graph):
        graph.initializer.extend(
            _make_dense(sparse.values.name, sparse) for sparse in graph.sparse_initializer
        )
        del graph.sparse_initializer[:]
        for node in filter(_is_sparse, graph.node):
            dense = _make_dense(node.output[0], node.attribute[0].sparse_tensor)
            node.attribute[0].CopyFrom(helper.make_attribute("value", dense))
    return out


def _make_dense(name: str, sparse: SparseTensorProto) -> TensorProto:
    return encode_tensor(name, decode_sparse(sparse), sparse.values.data_type)


def _is_sparse(node: NodeProto) -> bool:
    return (
        node.op_type == "Constant"
        and not node.domain
        and [attr.name for attr in node.attribute] == [_SPARSE]
    )


# What Resize and Upsample did before there were these attributes; the converter leaves defaults that do otherwise.
_RESIZE_ATTRIBUTES = 11
_OLD_RESIZE = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
# The only opset whose Scan takes batches.
_BATCHED_SCAN = 8


@keep_weights
def ensure_opset(proto: ModelProto, minimum: int) -> ModelProto:
    """The model itself when it is as new as `minimum`, else a copy at that opset, whose nodes all have names.

    Names, metadata, weights, functions and the types of inputs and outputs stay. A model of other domains alone
    imports this opset beside them. Raises ModelError naming the operator that cannot be converted. The numbers are not
    compared here.
    """
    opset = find_opset(proto)
    if opset:
        return proto if opset >= minimum else _convert_opset(proto, minimum)
    named = name_nodes(proto)
    named.opset_import.append(helper.make_opsetid("", minimum))
    return named


@keep_weights
def limit_opset(proto: ModelProto, newest: int) -> ModelProto:
    """The model itself when it is no newer than opset `newest`, else lowered; raises as `ensure_opset` does."""
    return proto if find_opset(proto) <= newest else _convert_opset(proto, newest)


def _convert_opset(proto: ModelProto, version: int) -> ModelProto:
    named = name_nodes(proto)
    _check_scans(named)
    # The converter serializes the model, which protobuf refuses beyond 2 GB.
    light, omitted = omit_weights(named)
    # Functions stay as they are, for the opset that they import themselves.
    bare = ModelProto()
    copy_fields(light, bare, ("functions",))
    set_contrib_apart(bare)
    try:
        converted = onnx.version_converter.convert_version(bare, version)
    except Exception as error:
        raise _explain_failure(named, version, error) from error
    result = deepcopy(light)
    declare_opset(result, version)
    result.graph.CopyFrom(converted.graph)
    _reattach_model(light, result)
    if find_opset(named) < _RESIZE_ATTRIBUTES <= version:
        _keep_resizes(result)
    _settle_names(light, result)
    full = restore_weights(result, omitted)
    try:
        check_structure(full, f"the model at opset {version}")
    except ModelError as error:
        other = "an older" if find_opset(named) > version else "a newer"
        fix = "inline its functions first" if named.functions else f"export it at {other} opset"
        raise ModelError(error.subject, error.cause, fix, code="Q109") from error
    return full


def _keep_resizes(proto: ModelProto) -> None:
    """Say in every Resize what an old one did without saying, in place."""
    for node in walk_nodes(proto.graph):
        if node.op_type == "Resize" and not node.domain:
            node.attribute.extend(starmap(helper.make_attribute, _OLD_RESIZE.items()))


def _check_scans(named: ModelProto) -> None:
    """onnx takes a Scan of opset 8 for one of opset 9, which has no axis for the batch."""
    scans = [node for node in walk_nodes(named.graph) if node.op_type == "Scan"]
    if scans and find_opset(named) == _BATCHED_SCAN:
        cause = f"has batches, as in opset {_BATCHED_SCAN}, which onnx cannot convert"
        raise ModelError(
            label_node(scans[0]), cause, "export the model at opset 9 or newer", code="Q109"
        )


def _reattach_model(before: ModelProto, after: ModelProto) -> None:
    """Put back the parts the converter drops: names, metadata, doc strings, annotations, types, sparse weights."""
    graphs = dict(walk_graphs(before.graph))
    for scope, graph in walk_graphs(after.graph):
        source = graphs[scope]
        originals = {node.name: node for node in source.node}
        gone = set(originals) - collect_names(graph.node)
        replaced = {name: node for node in source.node if node.name in gone for name in node.output}
        for node in graph.node:
            # A node that became another operator is a new one to the converter; its output tells whose place it has.
            taken = next((replaced[name] for name in node.output if name in replaced), None)
            original = originals.get(node.name, taken)
            if original is not None:
                _reattach_fields(original, node, "input", "output", "op_type", "attribute")
        _reattach_graph(source, graph, main=not scope)


def _reattach_fields(
    source: GraphProto | NodeProto, target: GraphProto | NodeProto, *left_out: str
) -> None:
    """Give a message, in place, the fields of another, all but these."""
    for field in source.DESCRIPTOR.fields:
        if field.name not in left_out:
            target.ClearField(field.name)
    copy_fields(source, target, left_out)


def _reattach_graph(source: GraphProto, graph: GraphProto, *, main: bool) -> None:
    # Inputs and outputs of a body may be tensors that the converter renamed. Its own value_info, which goes, calls its
    # new tensors scalars.
    renamed = () if main else ("input", "output")
    _reattach_fields(source, graph, "node", "initializer", *renamed)
    # The converter rewrites initializers field by field; those that it made itself stay.
    originals = {tensor.name: tensor for tensor in source.initializer}
    for tensor in graph.initializer:
        if tensor.name in originals:
            tensor.CopyFrom(originals[tensor.name])


def _explain_failure(proto: ModelProto, version: int, error: Exception) -> ModelError:
    message = str(error).strip()
    text = message.splitlines()[0] if message else type(error).__name__
    # Some messages quote the converter's source: "type_restriction.h:48: isUnallowed: Assertion `…` failed: …".
    text = text.rpartition("` failed: ")[2]
    # The converter names the operator in some of its messages, never the node.
    words = set(re.findall(r"\w+", message))
    culprits = [label_node(node) for node in walk_nodes(proto.graph) if node.op_type in words]
    where = f" (such nodes: {', '.join(culprits[:3])})" if culprits else ""
    cause = f"onnx cannot convert the model: {text}{where}"
    opset = find_opset(proto)
    fix = f"export it at opset {version}"
    if version < opset:
        fix = f"{fix}, or take a newer onnxruntime, with kernels for pairs at opset {opset}"
    return ModelError(f"opset {opset} to {version}", cause, fix, code="Q109")


def _settle_names(before: ModelProto, after: ModelProto) -> None:
    """Rename, in place, the tensors of `after` that `before` does not have in the same scope; name unnamed nodes.

    The converter numbers its tensors ("_v_5") anew in every subgraph, so that one may hide another of an outer scope,
    and leaves its nodes unnamed. Here they are called after the node they serve: "conv1/Constant". The nodes of
    `before` must have kept their names.
    """
    taken = list_names(before)
    graphs = dict(walk_graphs(before.graph))
    for scope, graph in walk_graphs(after.graph):
        old = list_defined(graphs[scope])
        makers = {tensor.name: "Constant" for tensor in graph.initializer}
        makers.update((name, node.op_type) for node in graph.node for name in node.output)
        readers = {}
        # Backwards, so that the first reader stays.
        for node in reversed(graph.node):
            readers.update(dict.fromkeys(node.input, node))
        names = {}
        for name in (name for node in graph.node for name in (*node.input, *node.output)):
            if name and name in makers and name not in old and name not in names:
                owner = _find_owner(name, old, readers)
                names[name] = choose_name(f"{owner}/{makers[name]}", taken)
        rename_tensors(graph, names)
        rename_items(graph.output, names)
    assign_names(after)


def _find_owner(name: str, old: set[str], readers: dict[str, NodeProto]) -> str:
    """The named node that reads the tensor, or the first tensor of the original model that is made from it."""
    while (reader := readers.get(name)) is not None:
        if reader.name:
            return reader.name
        original = next((output for output in reader.output if output in old), "")
        if original or not reader.output:
            return original or name
        name = reader.output[0]
    return name


@keep_weights
def inline_functions(proto: ModelProto) -> ModelProto:
    """The model itself without model-local functions, else a copy in which the nodes of each stand for all its calls.

    Names stay unique (onnx numbers the copies). A function written for another opset than the model's is converted.
    Raises ModelError when a function cannot be inlined.
    """
    if not proto.functions:
        return proto
    # Functions keep their weights: inlining makes new tensors of them, which nothing could be put back into.
    light, omitted = omit_weights(proto, functions=False)
    _write_defaults(light)
    own = find_opset(proto)
    foreign = any(find_opset(function) not in (0, own) for function in proto.functions)
    declared = collect_names(light.graph.value_info)
    if foreign:
        _write_types(light)
    try:
        inlined = onnx.inliner.inline_local_functions(light, convert_version=foreign)
    except Exception as error:
        cause = f"cannot be inlined: {error}"
        raise ModelError(
            "model-local functions", cause, "export without functions", code="Q108"
        ) from error
    if inlined.functions:
        names = ", ".join(sorted(function.name for function in inlined.functions))
        raise ModelError(
            names,
            "this model-local function cannot be inlined",
            "export without functions",
            code="Q108",
        )
    _drop_repeats(inlined)
    if foreign:
        # Types that the conversion needed; of tensors of other versions' operators they may be wrong afterwards.
        keep_named(inlined.graph.value_info, declared)
    # Nodes of a function need no names.
    assign_names(inlined)
    return restore_weights(inlined, omitted)


@keep_weights
def write_out_operators(proto: ModelProto, *op_types: str) -> ModelProto:
    """A copy in which operators are the nodes of their own functions, as ONNX defines them.

    Those that have no function stay.
    """
    light, omitted = omit_weights(proto)
    # The inliner asks for the types of all that such a function reads, constants too.
    declared = len(light.graph.value_info)
    _declare_stored(light.graph)
    chosen = [("", op_type) for op_type in op_types]
    inlined = onnx.inliner.inline_selected_functions(light, chosen, inline_schema_functions=True)
    del inlined.graph.value_info[declared:]
    assign_names(inlined)
    return restore_weights(inlined, omitted)


def _drop_repeats(proto: ModelProto) -> None:
    """Take out, in place, Constant nodes that define a tensor again: onnx's inliner doubles them where it converts."""
    for _, graph in walk_all_graphs(proto):
        defined: set[str] = set()
        for node in list(graph.node):
            if node.op_type == "Constant" and defined.issuperset(node.output):
                graph.node.remove(node)
            defined.update(node.output)


def _write_types(proto: ModelProto) -> None:
    """Declare, in place, the types of the main graph's tensors, which the inliner asks for where it converts."""
    graph = proto.graph
    _declare_stored(graph)
    with suppress(Exception):  # the inliner itself says then which type it lacks
        graph.CopyFrom(onnx.shape_inference.infer_shapes(proto).graph)


def _declare_stored(graph: GraphProto) -> None:
    """Declare, in place, the types of the initializers."""
    known = collect_names(list_declared(graph))
    stored = [tensor for tensor in graph.initializer if tensor.name not in known]
    graph.value_info.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in stored
    )


def _write_defaults(proto: ModelProto) -> None:
    """Give every call, in place, the attributes it leaves at the function's defaults, which onnx's inliner drops."""
    defaults = {
        (f.domain, f.name, f.overload): f.attribute_proto
        for f in proto.functions
        if f.attribute_proto
    }
    for node in walk_all_nodes(proto) if defaults else ():
        written = collect_names(node.attribute)
        known = defaults.get((node.domain, node.op_type, node.overload), ())
        node.attribute.extend(attr for attr in known if attr.name not in written)


_DEFAULTS = {"mean": 0.0, "scale": 1.0, "low": 0.0, "high": 1.0, "dtype": 1}
# A tensor repeats so many numbers: a prime, so that its rows do not begin alike.
_COUNT = 4093
# What a Like operator becomes. Constants of this form came with opset 12, CastLike with 15: before that it is a Cast.
_LIKE = f"""noise () => () {{
    table = Constant()
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    count = Constant<value_int = {_COUNT}>()
    shape = Shape(data)
    size = Size(data)
    positions = Range(zero, size, one)
    rows = Mod(positions, count)
    numbers = Gather(table, rows)
    tensor = Reshape(numbers, shape)
    output = CastLike(tensor, data)
}}"""
_CONSTANTS = 12
_CAST_LIKE = 15


@keep_weights
def fix_noise(proto: ModelProto) -> ModelProto:
    """The same numbers in each run for RandomNormal, RandomUniform and their Like; the model itself without any.

    ONNX Runtime seeds each by its place in the graph and goes on from run to run, given seeds too: speech synthesis
    (VITS) differs from itself by 0 dB, and no two models can be compared. The numbers depend on the distribution and on
    the name of the output, so that models that differ elsewhere draw alike.
    """
    opset = find_opset(proto)
    if opset < _CONSTANTS or not any(
        node.op_type in RANDOM_OPS for node in walk_nodes(proto.graph)
    ):
        return proto
    out = deepcopy(proto)
    for _, graph in walk_graphs(out.graph):
        nodes = (
            _write_draw(node, opset) if node.op_type in RANDOM_OPS else [node]
            for node in graph.node
        )
        replace_items(graph.node, chain.from_iterable(nodes))
    assign_names(out)
    return out


def _write_draw(node: NodeProto, opset: int) -> list[NodeProto]:
    """The nodes that give a random node's output from a table of numbers."""
    attributes = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    values = _DEFAULTS | attributes
    rng = np.random.default_rng(crc32(node.output[0].encode()))
    if "Normal" in node.op_type:
        numbers = rng.normal(values["mean"], values["scale"], _COUNT)
    else:
        numbers = rng.uniform(values["low"], values["high"], _COUNT)
    dtype = helper.tensor_dtype_to_np_dtype(values["dtype"])
    if not node.input:
        whole = encode_tensor("value", np.resize(numbers, values["shape"]).astype(dtype))
        return [helper.make_node("Constant", [], node.output, node.name, value=whole)]
    graph = parser.parse_graph(_LIKE)
    table = encode_tensor("value", numbers.astype(np.float32))
    graph.node[0].attribute.append(helper.make_attribute("value", table))
    if "dtype" in attributes or opset < _CAST_LIKE:
        graph.node[-1].CopyFrom(
            helper.make_node("Cast", ["tensor"], ["output"], to=values["dtype"])
        )
    names = {step.output[0]: f"{node.output[0]}/{step.output[0]}" for step in graph.node}
    names |= {"data": node.input[0], "output": node.output[0]}
    rename_tensors(graph, names)
    return list(graph.node)
