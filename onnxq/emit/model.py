"""Every pair, bias and float type of a plan written into its model, and the notes of the plan in its metadata."""

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, helper

from onnxq.arrays import Shape, as_int64
from onnxq.backends import find_target
from onnxq.backends.base import FitsMatrix
from onnxq.calibrate.constants import find_tensor
from onnxq.emit.pairs import PairWriter
from onnxq.errors import PlanError
from onnxq.graph import Editor, GraphIndex, ModelLike, NodeRef, find_opset, get_index, infer_shapes
from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.graph.integer_operators import NodeWriter
from onnxq.graph.light import bare_proto, copy_proto, keep_weights
from onnxq.graph.precision.narrow import is_exact, write_types
from onnxq.graph.precision.widen import SourceTypes
from onnxq.graph.scopes import map_end_types, map_entries, walk_all_nodes, walk_graphs
from onnxq.graph.storage import release_pages
from onnxq.plan import Plan, SitePlan, SitePlans, check_numbers, check_specs, from_json, to_json
from onnxq.plan.names import name_part
from onnxq.progress import Progress, count_items, silent
from onnxq.sites import Edge, NameSet, Role, TensorId
from onnxq.spec import FLOAT_TYPES, FloatType

# The first IR version with 4-bit types. Opset 21 brings it along; a table of them can stand in an older opset.
_PACKED_IR = 10
# Ranks that the data of Convs have in every engine.
_CONV_RANKS = (3, 4, 5)
# Multiplications for each value that is transposed, from which on a Conv is no slower than floats with AVX2 or VNNI.
_REPAID = 128


def replace_biases(proto: ModelLike, plan: Plan) -> ModelLike:
    """The prepared model with the plan's float biases in the place of its own.

    Each takes the place at one input only: other readers of the old bias keep it. Raises PlanError for an input that is
    not there.
    """
    if not plan.biases:
        return proto
    index = get_index(proto)
    editor = Editor(proto)
    for bias in plan.biases:
        node = index.find_node(bias.edge.node)
        # The input behind the last is allowed: an operator without a bias gets one there.
        if bias.edge.index > len(node.inputs):
            cause = "this node has no place for a bias"
            raise PlanError(bias.edge, cause, "plan this model again", code="Q404")
        base = f"{name_part(bias.edge, 'float')}/corrected"
        editor.replace_input(bias.edge, editor.add_constant(node.scope, base, bias.values))
    return editor.finish()


def emit_pairs(
    proto: ModelLike, plan: Plan, progress: Progress = silent, *, fold_constants: bool = False
) -> ModelLike:
    """The prepared model with every pair of the plan in it.

    Weights and biases become integer initializers behind a DequantizeLinear; activations get a
    QuantizeLinear/DequantizeLinear pair, with a Clip when the bit width is narrower than its container,
    or a DynamicQuantizeLinear/DequantizeLinear pair where their scale is computed at each run.
    Every node is named after its site and carries `onnxq.*` metadata; the plan without its numbers goes into the
    model's metadata. fold_constants: constants are the floats that they would be dequantized to, and the plan is not
    noted: for trials, which are run and not kept.

    Raises PlanError for a site without numbers, one that is not in this model, or one that the target cannot run.
    """
    index = get_index(proto)
    _check_fit(proto, index, plan)
    own_inputs = frozenset(site.site for site in plan.sites if isinstance(site.site, Edge))
    tables = {site.group: site for site in plan.sites if site.group and site.find_lookups(index)}
    captured = _find_captured(plan, index)
    target = find_target(plan.target)
    in_integers = _find_integer_readers(plan, index)
    writer = PairWriter(
        Editor(proto),
        index,
        in_integers,
        own_inputs,
        tables,
        captured,
        whole=target.whole,
        bounds_integers=target.bounds_integers,
        fold_constants=fold_constants,
    )
    for site in plan.existing:
        writer.connect_existing(site)
    # Tables last: they may share the integers of a weight.
    ordered = sorted(plan.sites, key=lambda site_plan: site_plan is tables.get(site_plan.group))
    with progress("rounding weights and writing pairs", len(ordered)) as task:
        for site in count_items(ordered, task):
            _write_site(writer, site)
    _order_data(writer.editor, plan, index)
    writer.editor.remove_unused()
    if not fold_constants:
        records = {**read_records(proto, index), **writer.records}
        writer.editor.model_metadata({PLAN_KEY: pack_plan(plan), BITS_KEY: json.dumps(records)})
    done = writer.editor.export()
    cpu = plan.placement.cpu if plan.placement else ""
    rules = {rule.name for rule in target.rules if cpu in rule.pointwise}
    if rules:
        done = _write_pointwise(done, plan, rules)
    if any(site.spec.storage_bits < 8 for site in plan.sites):
        proto = bare_proto(done)
        proto.ir_version = max(proto.ir_version, _PACKED_IR)
    return done


def _check_fit(proto: ModelLike, index: GraphIndex, plan: Plan) -> None:
    """Raise PlanError where the model or the target cannot have the plan's pairs."""
    opset = find_opset(proto)
    if opset < plan.opset:
        own = f"is of opset {opset}" if opset else "imports none of ONNX's own operators"
        cause = f"the plan needs opset {plan.opset}, and the model {own}"
        raise PlanError(
            plan.model, cause, "plan this model again, which raises its opset", code="Q404"
        )
    check_specs(plan, index)
    check_numbers(plan)


def _write_pointwise(proto: ModelLike, plan: Plan, rules: Collection[str]) -> ModelLike:
    """Products by these rules: data [..., K] -> Transpose -> Conv -> Transpose -> [..., N], with weights [N, K, 1 ...].

    Engines whose Convs take channels last leave both Transposes out where shapes are fixed. Elsewhere they take longer
    than small products, which stay.
    """
    index = get_index(proto)
    editor = Editor(proto)
    # With AVX2 alone OpenVINO multiplies matrices of integers more slowly than floats, while its
    # kernel of convolutions of one tap is twice as fast.
    weights = (
        site for site in plan.sites if site.role.is_weight and site.rule in rules and not site.group
    )
    for node in (index.find_node(edge.node) for site in weights for edge in site.named_consumers):
        rank = index.find_rank(node.result) or 0
        pair = index.maker(node, 1, DEQUANTIZE)
        stored = index.find_input(pair)
        codes = index.find_constant(stored)
        name = node.name
        taps = [1] * (rank - 2)
        if not pair or not stored or codes is None or rank not in _CONV_RANKS:
            continue
        if index.find_sizes(node.result) is None and codes.size < _REPAID * sum(codes.shape):
            continue
        # A weight that others read as well stays a matrix.
        alone = index.find_sole_reader(stored) and index.find_sole_reader(pair.result)
        if not alone or not index.maker(node, 0, DEQUANTIZE):
            continue
        # [K, N] to [N, K, 1 ...], whose output channels lie along axis 0.
        editor.replace_initializer(stored, codes.T.reshape(*codes.shape[::-1], *taps))
        editor.set_attr(pair.name, "axis", 0)
        editor.set_op(name, "Conv")
        editor.set_attr(name, "kernel_shape", taps)
        writer = NodeWriter(editor, node.scope, name)
        data, result = (
            editor.fresh(f"{name}/{part}") for part in ("channels_first", "channels_second")
        )
        editor.replace_output(name, 0, result)
        # [N, ..., K] to [N, K, ...] in front, and back behind.
        ends = {
            node.inputs[0]: (data, [0, rank - 1, *range(1, rank - 1)]),
            result: (node.outputs[0], [0, *range(2, rank), 1]),
        }
        for source, (target, perm) in ends.items():
            other = editor.fresh(f"{target}/Transpose")
            writer.add("Transpose", [source], target, name=other, perm=perm)
        editor.replace_input(node.make_edge(0), data)
    return editor.export()


def write_matrices(proto: ModelLike, fits: FitsMatrix) -> ModelLike:
    """A copy in which float convolutions of single channels are products by matrices, where the target says so.

    For each channel y = x · M, where x and y have a map's pixels side by side. M is the convolution of the unit images,
    which engines compute when they load the file. The product is a Conv with M as its data and x as its weights, so
    that it adds the bias and clamps as before; several pictures are several filters of a channel. Results are declared,
    since engines do not see their batch behind a Reshape, and fuse no Add whose two inputs may differ in it.
    """
    typed = infer_shapes(proto)
    index = get_index(typed)
    editor = Editor(proto)
    counts: dict[tuple[str, Any], str] = {}
    results = set()
    for node in index.nodes:
        weight = index.input_value(node, 1) if node.is_onnx("Conv") else None
        if weight is None or weight.dtype != np.float32 or weight.shape[1] > 1:
            continue
        batch, *data = index.input_shape(node) or (None,)
        sizes = tuple(
            dim
            for dim in (*data, *(index.find_shape(node.result) or ())[1:])
            if isinstance(dim, int)
        )
        # Maps of two sides, with as many channels behind the node as in front of it.
        before = sizes[:3]
        after = sizes[3:]
        known = (
            batch
            and len(after) == len(data) == len(before)
            and before[0] == after[0] == len(weight)
        )
        if known and fits(before, after, weight[0].size):
            # The kernel computes an activation as well.
            end = index.find_follower(node, "Relu", "Clip") or node
            writer = NodeWriter(editor, node.scope, node.name)
            _write_matrix(writer, node, end, (batch, before, after), counts)
            results.add(end.outputs[0])
    done = editor.export()
    for (_, graph), (_, source) in zip(
        walk_graphs(done.graph), walk_graphs(typed.graph), strict=True
    ):
        missing = results.difference(value.name for value in graph.value_info)
        graph.value_info.extend(value for value in source.value_info if value.name in missing)
    return done


def _write_matrix(
    writer: NodeWriter,
    node: NodeRef,
    end: NodeRef,
    maps: tuple[Any, Shape, Shape],
    counts: dict[tuple[str, Any], str],
) -> None:
    editor = writer.editor
    add = writer.add
    hold = writer.constant
    batch, (channels, *sides), (_, *after) = maps
    x, weight, *biases = node.inputs
    # A single picture needs neither the Transposes nor copies of the bias, about 2 µs each.
    several = batch != 1
    pixels = math.prod(sides)

    def write_reshape(tensor: str, *shape: int) -> str:
        return add("Reshape", [tensor, hold(as_int64(shape))])

    def swap_axes(tensor: str, output: str = "") -> str:
        return add("Transpose", [tensor], output, perm=(1, 0, 2, 3))

    images = hold(np.eye(pixels, dtype=np.float32).reshape(pixels, 1, *sides))
    attrs = {name: value for name, value in node.attrs.items() if name != "group"}
    # [pixels, C, ...] to [1, C · pixels, ...]: a group for each channel, a row of M for each pixel.
    matrix = write_reshape(swap_axes(add("Conv", [images, weight], **attrs)), 1, -1, *after)
    # [C · N, pixels, 1, 1]: the pictures of a channel are the filters of its group.
    filters = write_reshape(swap_axes(x) if several else x, -1, pixels, 1, 1)
    # A filter for each picture and channel, so that the bias of a channel stands there once for each picture.
    if several and any(biases):
        # Nodes of one symbol for the batch share the count.
        key = node.scope, batch
        if key not in counts:
            counts[key] = add("Gather", [add("Shape", [x]), hold(np.zeros(1, np.int64))])
        biases = [write_reshape(add("Expand", [write_reshape(biases[0], -1, 1), counts[key]]), -1)]
    for k, tensor in enumerate((matrix, filters, *biases)):
        editor.replace_input(node.make_edge(k), tensor)
    for name, value in {
        **dict.fromkeys(node.attrs),
        "group": channels,
        "kernel_shape": [1, 1],
    }.items():
        editor.set_attr(node.name, name, value)
    if several:
        # What has another shape now gets another name.
        product = editor.fresh(f"{node.name}/product")
        editor.replace_output(node.name, 0, product)
        if end is not node:
            editor.replace_input(end.make_edge(0), product)
            product = editor.fresh(f"{node.name}/clamped")
            editor.replace_output(end.name, 0, product)
        swap_axes(write_reshape(product, channels, -1, *after), end.outputs[0])


def _find_captured(plan: Plan, index: GraphIndex) -> frozenset[TensorId]:
    """The weights with several sites, one of them in a body of If, Loop or Scan, outside of which they are stored."""
    sites = [
        site.site for site in plan.sites if site.role.is_weight and isinstance(site.site, Edge)
    ]
    tensors = [find_tensor(index, site) for site in sites]
    counts = Counter(tensors)
    return frozenset(
        tensor
        for site, tensor in zip(sites, tensors, strict=True)
        if counts[tensor] > 1 and tensor.scope != site.scope
    )


def _write_site(writer: PairWriter, site: SitePlan) -> None:
    if not site.complete:
        fix = "calibrate the plan first (`onnxq quantize`)"
        raise PlanError(site.name, "has no scale", fix, code="Q405")
    qparams = site.qparams
    if not (site.role.is_constant or (writer.whole and writer.is_constant(site))):
        # Numbers left over from before a person made the site dynamic mean nothing.
        writer.write_activation(site, None if site.spec.dynamic else qparams)
    elif qparams is not None:
        writer.write_constant(site, qparams)
    if qparams is not None:
        # Those of a large model's blocks lie in a file, and are not read again.
        release_pages(qparams.scale, qparams.zero_point)


def _order_data(editor: Editor[ModelLike], plan: Plan, index: GraphIndex) -> None:
    """Gather the data of operators in the order of their weights' rows, once for those of one tensor and order."""
    gathered = {}
    for site in plan.sites:
        rows = None if site.qparams is None else site.qparams.order
        for node in (
            index.find_node(edge.node) for edge in site.named_consumers if rows is not None
        ):
            order = np.asarray(rows, np.int64)
            data = node.inputs[0]
            key = node.scope, data, order.tobytes()
            if key not in gathered:
                parts = (name_part(site.site, part) for part in ("order_node", "ordered"))
                name, result = map(editor.fresh, parts)
                indices = editor.add_constant(node.scope, name_part(site.site, "order"), order)
                gathered[key] = result
                editor.insert_node(
                    node.scope,
                    "Gather",
                    [data, indices],
                    [result],
                    name=name,
                    attrs={"axis": -1},
                    before=node.name,
                )
            editor.replace_input(node.make_edge(0), gathered[key])


def _find_integer_readers(plan: Plan, index: GraphIndex) -> NameSet:
    """Names of the nodes that read a quantized activation, so that their kernels may multiply integers."""
    activations = [site for site in plan.all_sites if site.role is Role.ACTIVATION]
    return frozenset(edge.node for site in activations for edge in site.find_sure_readers(index))


def emit_types(proto: ModelLike, plan: Plan, source: SourceTypes) -> ModelLike:
    """The float32 model with the plan's float types, and inputs and outputs in theirs.

    source: the types that the model came in, which its inputs and outputs keep where the plan says nothing else.
    """
    types = plan.precision
    interface = dict(source.interface)
    if types is not None and types.io is not None:
        kinds = map_end_types(proto.graph)
        floats = {name for name in kinds if kinds[name] == FloatType.FLOAT32.onnx_type}
        # Tensors that join the model to a part which was not run keep the types that this part
        # reads.
        interface.update(dict.fromkeys(sorted(floats - source.fixed), types.io.onnx_type))
    if types is None or types.type is FloatType.FLOAT32:
        came = FLOAT_TYPES.get(source.computes, FloatType.FLOAT16)
        return write_types(proto, came.onnx_type, None, interface=interface) if interface else proto
    narrow = types.type.onnx_type
    index = get_index(proto)
    # Pairs that the model came with keep their numbers.
    wide = {node.node for node in types.kept} | {
        name for name in plan.kept if not _is_same(index, name, narrow)
    }
    return write_types(proto, narrow, wide, limited=types.limited, interface=interface)


def _is_same(index: GraphIndex, name: str, narrow: int) -> bool:
    """True for half a pair whose scales are in this type what they are in float32."""
    node = index.find_node(name)
    scale = index.input_value(node, 1) if node.is_onnx(QUANTIZE, DEQUANTIZE) else None
    return scale is not None and is_exact(scale, narrow)


# Keys of the model's metadata, which every engine and most tools keep.
PLAN_KEY = "onnxq.plan"
BITS_KEY = "onnxq.bits"
# Of a plan: damaged metadata must not fill the memory.
_MOST_BYTES = 1 << 28
# Fields of ONNX's messages that say nothing to an engine.
_TEXTS = frozenset({"doc_string", "metadata_props"})


def pack_plan(plan: Plan) -> str:
    """The plan as the model's metadata hold it: JSON without scales, zero points, weights and biases, packed.

    Its names, which exporters make of whole stacks of modules, took up to a third of a small file.
    """

    def strip(sites: SitePlans) -> SitePlans:
        return tuple(site.without_numbers() for site in sites)

    # The numbers stand in the model's own initializers: a second copy could come to contradict them.
    bare = replace(plan, sites=strip(plan.sites), existing=strip(plan.existing), biases=())
    text = _dump_compactly(json.loads(to_json(bare)))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack_plan(text: str) -> Plan:
    """The plan of a model's metadata, where it may be plain JSON too. Raises PlanError."""
    with suppress(ValueError, zlib.error):
        packed = base64.b64decode(text, validate=True)
        text = zlib.decompressobj().decompress(packed, _MOST_BYTES).decode()
    return from_json(text, source=PLAN_KEY)


def _dump_compactly(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_records(proto: ModelLike, index: GraphIndex) -> dict[str, object]:
    """The records of an earlier run for the nodes that the model still has; {} where they cannot be read."""
    text = map_entries(proto.metadata_props).get(BITS_KEY, "{}")
    try:
        return {name: record for name, record in json.loads(text).items() if name in index.named}
    except (json.JSONDecodeError, AttributeError):
        # NOTE: another tool may have damaged the note; `annotate` warns of it, and the pairs do not depend on it.
        return {}


@keep_weights
def leave_out_notes(proto: ModelProto, level: Literal["names", "none"]) -> ModelProto:
    """A copy of the model without the plan, doc strings, and the metadata of all but the model itself.

    level: "names" keeps the names of nodes, and the bits of sites by them; "none" neither. Entries of the model's
    metadata that are not onnxq's stay, because programs read them: names of classes, sizes of images, tokens.
    """
    props = map_entries(proto.metadata_props)
    bits = _read_bits_alone(proto, props.get(BITS_KEY, "{}")) if level == "names" else ""
    props = {key: value for key, value in props.items() if key not in (PLAN_KEY, BITS_KEY)}
    if bits:
        props[BITS_KEY] = bits
    bare = copy_proto(proto)
    _clear_fields(bare, _TEXTS)
    helper.set_model_props(bare, props)
    for node in walk_all_nodes(bare) if level == "none" else ():
        node.ClearField("name")
    return bare


def _read_bits_alone(proto: ModelProto, text: str) -> str:
    """The bits alone of a record of sites, once for each pair; "" where there are none."""
    halves = {node.name for node in walk_all_nodes(proto) if node.op_type == QUANTIZE}
    records = {
        name: {"bits": record["bits"]}
        for name, record in json.loads(text).items()
        if name not in halves and "bits" in record
    }
    return _dump_compactly(records) if records else ""


def _clear_fields(message: Any, names: Collection[str]) -> None:
    """Clear the fields of these names in a message of protobuf and in all that it holds."""
    for field, value in message.ListFields():
        if field.name in names:
            message.ClearField(field.name)
        elif field.type == field.TYPE_MESSAGE:
            for part in value if hasattr(value, "__len__") else (value,):
                _clear_fields(part, names)
