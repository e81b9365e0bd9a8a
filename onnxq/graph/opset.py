"""Other opsets: onnx's version converter, with everything it loses put back and its result checked."""

from __future__ import annotations

import re

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper

from onnxq.errors import ModelError
from onnxq.graph.index import find_opset
from onnxq.graph.light import keep_weights
from onnxq.graph.load import check_structure
from onnxq.graph.names import assign_names, choose_name, list_names, name_nodes
from onnxq.graph.precision.contrib import set_contrib_apart
from onnxq.graph.scopes import label_node, list_defined, rename_reads, walk_graphs
from onnxq.graph.weights import copy_fields, omit_weights, restore_weights

# What Resize and Upsample did before there were these attributes; the converter leaves defaults that do otherwise.
_RESIZE_ATTRIBUTES = 11
_OLD_RESIZE = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
# The only opset whose Scan takes batches.
_BATCHED_SCAN = 8


@keep_weights
def ensure_opset(proto: ModelProto, minimum: int) -> ModelProto:
    """The model itself when it is as new as `minimum`, else upgraded; raises as `upgrade_opset` does."""
    return proto if find_opset(proto) >= minimum else upgrade_opset(proto, minimum)


@keep_weights
def limit_opset(proto: ModelProto, newest: int) -> ModelProto:
    """The model itself when it is no newer than opset `newest`, else lowered; raises as `upgrade_opset` does."""
    return proto if find_opset(proto) <= newest else _convert_opset(name_nodes(proto), newest)


@keep_weights
def upgrade_opset(proto: ModelProto, minimum: int) -> ModelProto:
    """A copy at opset `minimum`, or at its own when that is as new. Nodes are named first if they are not.

    Names, metadata, weights, functions and the types of inputs and outputs stay. A model of other domains alone
    imports this opset beside them. Raises ModelError naming the operator that cannot be converted. The numbers are not
    compared here.
    """
    named = name_nodes(proto)
    opset = find_opset(named)
    if opset:
        return named if opset >= minimum else _convert_opset(named, minimum)
    result = ModelProto()
    result.CopyFrom(named)
    result.opset_import.append(helper.make_opsetid("", minimum))
    return result


def _convert_opset(named: ModelProto, version: int) -> ModelProto:
    _check_scans(named)
    light, omitted = omit_weights(named)
    # Functions stay as they are, for the opset that they import themselves.
    bare = ModelProto()
    copy_fields(light, bare, ("functions",))
    set_contrib_apart(bare)
    try:
        converted = onnx.version_converter.convert_version(bare, version)
    except Exception as error:
        raise _explain_failure(named, version, error) from error
    result = ModelProto()
    copy_fields(light, result, ("graph", "opset_import", "ir_version"))
    result.opset_import.extend(_list_imports(named, version))
    result.ir_version = max(named.ir_version, helper.find_min_ir_version_for(result.opset_import, ignore_unknown=True))
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
    for _, graph in walk_graphs(proto.graph):
        for node in graph.node:
            if node.op_type == "Resize" and not node.domain:
                node.attribute.extend(helper.make_attribute(name, value) for name, value in _OLD_RESIZE.items())


def _check_scans(named: ModelProto) -> None:
    """onnx takes a Scan of opset 8 for one of opset 9, which has no axis for the batch."""
    for _, graph in walk_graphs(named.graph):
        for node in graph.node:
            if node.op_type == "Scan" and find_opset(named) == _BATCHED_SCAN:
                cause = f"has batches, as in opset {_BATCHED_SCAN}, which onnx cannot convert"
                raise ModelError(label_node(node), cause, "export the model at opset 9 or newer", code="Q109")


def _list_imports(proto: ModelProto, minimum: int) -> list[onnx.OperatorSetIdProto]:
    return [
        helper.make_opsetid(entry.domain, minimum if entry.domain in ("", "ai.onnx") else entry.version)
        for entry in proto.opset_import
    ]


def _reattach_model(before: ModelProto, after: ModelProto) -> None:
    """Put back the parts the converter drops: names, metadata, doc strings, annotations, types, sparse weights."""
    graphs = dict(walk_graphs(before.graph))
    for scope, graph in walk_graphs(after.graph):
        source = graphs[scope]
        originals = {node.name: node for node in source.node}
        gone = set(originals) - {node.name for node in graph.node}
        replaced = {name: node for node in source.node if node.name in gone for name in node.output}
        for node in graph.node:
            # A node that became another operator is a new one to the converter; its output tells whose place it has.
            taken = next((replaced[name] for name in node.output if name in replaced), None)
            original = originals.get(node.name, taken)
            if original is not None:
                _reattach_node(original, node)
        _reattach_graph(source, graph, main=not scope)


def _reattach_node(original: NodeProto, node: NodeProto) -> None:
    carried = ("name", "doc_string", "metadata_props", "overload", "device_configurations", "domain")
    for name in carried:
        node.ClearField(name)
    kept = [field.name for field in original.DESCRIPTOR.fields if field.name not in carried]
    copy_fields(original, node, tuple(kept))


def _reattach_graph(source: GraphProto, graph: GraphProto, *, main: bool) -> None:
    # The converter's own value_info calls its new tensors scalars.
    cleared = ["name", "doc_string", "metadata_props", "quantization_annotation", "sparse_initializer", "value_info"]
    # Those of a body may be tensors that the converter renamed.
    interface = ("input", "output")
    for name in (*cleared, *(interface if main else ())):
        graph.ClearField(name)
    copy_fields(source, graph, ("node", "initializer", *(() if main else interface)))
    # The converter rewrites initializers field by field; those that it made itself stay.
    originals = {tensor.name: tensor for tensor in source.initializer}
    for tensor in graph.initializer:
        if tensor.name in originals:
            tensor.CopyFrom(originals[tensor.name])


def _explain_failure(proto: ModelProto, version: int, error: Exception) -> ModelError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # Some messages quote the converter's source: "type_restriction.h:48: isUnallowed: Assertion `…` failed: …".
    text = text.rpartition("` failed: ")[2]
    # The converter names the operator in some of its messages, never the node.
    words = set(re.findall(r"\w+", str(error)))
    culprits = [
        label_node(node) for _, graph in walk_graphs(proto.graph) for node in graph.node if node.op_type in words
    ]
    where = f" (such nodes: {', '.join(culprits[:3])})" if culprits else ""
    cause = f"onnx cannot convert the model: {text}{where}"
    fix = f"export it at opset {version}"
    return ModelError(f"opset {find_opset(proto)} to {version}", cause, fix, code="Q109")


def _settle_names(before: ModelProto, after: ModelProto) -> None:
    """Rename, in place, the tensors of `after` that `before` does not have in the same scope; name unnamed nodes.

    The converter numbers its tensors ("_v_5") anew in every subgraph, so that one may hide another of an outer scope,
    and leaves its nodes unnamed. Here they are called after the node they serve: "conv1/Constant". The nodes of
    `before` must have kept their names.
    """
    taken = list_names(before)
    graphs = dict(walk_graphs(before.graph))
    for scope, graph in walk_graphs(after.graph):
        _rename_tensors(graph, _choose_names(graphs[scope], graph, taken))
    assign_names(after)


def _choose_names(source: GraphProto, graph: GraphProto, taken: set[str]) -> dict[str, str]:
    old = list_defined(source)
    makers = {tensor.name: "Constant" for tensor in graph.initializer}
    makers.update((name, node.op_type) for node in graph.node for name in node.output)
    readers: dict[str, NodeProto] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, node)
    names: dict[str, str] = {}
    for name in (name for node in graph.node for name in (*node.input, *node.output)):
        if name and name in makers and name not in old and name not in names:
            names[name] = choose_name(f"{_find_owner(name, old, readers)}/{makers[name]}", taken)
    return names


def _find_owner(name: str, old: set[str], readers: dict[str, NodeProto]) -> str:
    """The named node that reads the tensor, or the first tensor of the original model that is made from it."""
    while (reader := readers.get(name)) is not None:
        if reader.name:
            return reader.name
        made = next((output for output in reader.output if output in old), "")
        if made or not reader.output:
            return made or name
        name = reader.output[0]
    return name


def _rename_tensors(graph: GraphProto, names: dict[str, str]) -> None:
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in graph.output:
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    rename_reads(graph, names)
