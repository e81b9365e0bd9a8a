"""Rewrites of single nodes, and of a node and its neighbour: what ORT has faster, or quantized, kernels for."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import GraphProto

from onnxq.arrays import Array, Integers, are_finite, as_float64, as_int64
from onnxq.graph import (
    GraphIndex,
    NodeRef,
    NodeRefs,
    copy_proto,
    fold_constants,
    get_index,
    infer_shapes,
    rebuild,
    walk_graphs,
)
from onnxq.graph.scopes import iterate_subgraphs, list_defined, rename_reads
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.linear import find_linear
from onnxq.passes.patterns import INVARIANTS, SINGLE, Edit, find_pad_value, rewrite_nodes
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import MaybeTensor, TensorId

# Of padding: at the beginnings of all axes, then at their ends.
Amounts = tuple[int, ...]
_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}
# In a window with any other value, one as low as this is not the largest.
_LOWEST = float(np.finfo(np.float32).min)
# Inputs of a Loop in front of its state, a count and a condition, and results of its body in front of it, a condition.
_LEADING = {"Loop": (2, 1), "Scan": (0, 0)}


def remove_dead(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Bypass nodes that do nothing in inference, then remove those that nobody reads.

    Identity, Dropout, neutral arithmetic, a Cast to the same type, an empty Pad, a Gather of all places in order, a
    LeakyRelu of slope 1. They hide patterns (x · Sigmoid(1·x)) and, between pairs, cost a float kernel. Whatever names
    a (sub)graph output stays.
    """
    edit = Edit(state.model)
    index = edit.index
    alias: dict[TensorId, TensorId] = {}
    bypassed = {}
    for node in index.nodes:
        source = _find_repeated(index, node)
        if source is None or index.is_kept(node.result):
            continue
        bypassed[node.name] = f"{node.name}: {node.op_type} that does nothing"
        maker = index.find_producer(source) if index.find_sole_reader(source) else None
        if node.op_type == "LeakyRelu" and maker is not None and maker.result == source:
            # The name is that of the tensor before the node was put in.
            edit.absorb_chain(maker, [node])
            continue
        # Of several in a row each repeats what the first of them reads.
        source = alias[node.result] = alias.get(source, source)
        edit.redirect_readers(node.result, source.name)
        edit.remove_node(node)
    # Also where nothing was bypassed: the export leaves out what nobody reads.
    result = edit.export()
    removed = sorted(index.named.keys() - get_index(result).named.keys() - bypassed.keys())
    changed = [*bypassed.values(), *(f"{name}: read by nobody" for name in removed)]
    return (replace(state, model=result) if changed else state), PassReport("dead", tuple(changed))


def _find_repeated(index: GraphIndex, node: NodeRef) -> MaybeTensor:
    """The tensor a node merely repeats."""
    # A Dropout's mask, where somebody looks at it.
    extra = [out for out in node.results if out != node.result]
    if node.domain or any(index.list_consumers(out) or index.is_kept(out) for out in extra):
        return None
    op_type = node.op_type
    x = index.find_input(node)
    if op_type == "Identity":
        return x
    if op_type == "Dropout":
        return x if _is_inference(index, node) else None
    if op_type == "Cast" and x is not None:
        return x if index.find_dtype(x) == node.attrs.get("to") else None
    if op_type == "LeakyRelu":
        # As quantized files have it between a product or a pool and what ONNX Runtime would join to it.
        return x if node.attrs.get("alpha") == 1.0 else None
    if op_type == "Pad":
        amounts = pad_amounts(index, node, index.find_rank(x))
        return x if amounts is not None and not any(amounts) else None
    if op_type == "Gather" and x is not None:
        return _find_ordered(index, node, x)
    return _find_neutral(index, node) if op_type in _NEUTRAL else None


def _find_ordered(index: GraphIndex, node: NodeRef, x: TensorId) -> MaybeTensor:
    """The tensor that a Gather of all places in order repeats: its input, or the one flattened in front of it.

    torch's exporter writes `as_strided` so, behind each global mean; the NPU's compiler crashes on it.
    """
    places = index.input_value(node, 1)
    shape = index.find_shape(x)
    if (
        places is None
        or shape != (places.size,)
        or not np.array_equal(np.ravel(places), np.arange(places.size))
    ):
        return None
    maker = index.find_onnx_producer(x, "Reshape", "Flatten")
    source = x if maker is None else index.find_input(maker)
    return source if index.find_shape(source) == np.shape(places) else None


def _is_inference(index: GraphIndex, node: NodeRef) -> bool:
    """Since opset 12 an input says whether a Dropout trains; before it never did in an exported model."""
    if index.find_input(node, 2) is None:
        return True
    training = index.input_value(node, 2)
    return training is not None and not training.any()


def _find_neutral(index: GraphIndex, node: NodeRef) -> MaybeTensor:
    # x - 0 and x / 1 are neutral, 0 - x and 1 / x are not.
    for k in (0, 1) if node.op_type in ("Mul", "Add") else (0,):
        constant = index.read_scalar(node, 1 - k)
        x = index.find_input(node, k)
        if constant is None or index.is_constant(x):
            continue
        # A zero of more axes than x still gives the sum these axes.
        if constant[0] == _NEUTRAL[node.op_type] and constant[1] <= index.find_least_rank(x):
            return x
    return None


@rewrite_nodes("residual")
def reorder_residual(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make a residual Add in front of LayerNormalization Sum, for ORT.

    ORT fuses Add and LayerNormalization into SkipLayerNormalization wherever it can tell the shapes, and on the CPU
    that kernel is slower than the two (1.31, one thread, 6-layer encoder, 96 tokens: float 12.7 → 11.1 ms, int8 6.2 →
    4.5 with Sum). Sum of two tensors is the same addition, bit for bit, and no fusion looks for it.
    """
    if _is_residual(edit.index, node):
        edit.replace_node(node, "Sum", node.inputs)
        yield f"{node.name}: Sum instead of Add"


def _is_residual(index: GraphIndex, node: NodeRef) -> bool:
    # With a constant it is a bias, which other fusions look for.
    if not node.is_onnx("Add") or index.has_constant(node, 0) or index.has_constant(node, 1):
        return False
    readers = (
        index.find_node(edge.node) for edge in index.list_consumers(node.result) if edge.index == 0
    )
    normed = any(reader.is_onnx("LayerNormalization") for reader in readers)
    return normed and index.find_dtype(node.result) in SINGLE


@rewrite_nodes("prelu")
def replace_prelu(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make PRelu with a constant slope LeakyRelu (one slope) or Max(x, slope·x) (slopes of at most 1).

    ORT's PRelu kernel is slow and has no quantized form: four 1x1 convolutions of 64 channels at 28x28 take 0.66 ms
    with PRelu, 0.14 with LeakyRelu, 0.18 with Max; int8 with pairs on both sides 0.71, 0.095 (QLinearLeakyRelu) and
    0.15.
    """
    index = edit.index
    x = index.find_input(node)
    slope = index.input_value(node, 1) if node.is_onnx("PRelu") else None
    if slope is None or not slope.size or index.find_dtype(x) not in SINGLE:
        return
    wide = as_float64(slope)
    if not are_finite(wide) or slope.ndim > index.find_least_rank(x):
        return
    if (wide == wide.flat[0]).all():
        edit.replace_node(node, "LeakyRelu", node.inputs[:1], {"alpha": float(wide.flat[0])})
        yield f"{node.name}: LeakyRelu, its slopes are one"
        return
    # Max would choose the other branch for x < 0 where a slope exceeds 1; with infinities a slope of 0 gives NaN.
    if wide.max() > 1 or (wide == 0).any():
        return
    scaled = edit.insert_before(node, "Mul", node.inputs, f"{node.outputs[0]}/scaled")
    edit.replace_node(node, "Max", (node.inputs[0], scaled))
    yield f"{node.name}: Max(x, slope·x)"


@rewrite_nodes("pool")
def replace_reduce_mean(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make ReduceMean over all spatial axes GlobalAveragePool: in ORT only the latter has a quantized kernel.

    For float [N, C, spatial...] tensors of known rank that hold no squares. Without kept dims it becomes
    GlobalAveragePool and Flatten (a passthrough on integers).
    """
    if find_pooled_axes(edit.index, node) is None:
        return
    data = node.inputs[:1]
    if node.attrs.get("keepdims", 1):
        edit.replace_node(node, "GlobalAveragePool", data)
    else:
        # The node's own name and output go to the last of the two.
        made = edit.insert_before(node, "GlobalAveragePool", data, f"{node.outputs[0]}/pooled")
        edit.replace_node(node, "Flatten", (made,), {"axis": 1})
    yield f"{node.name}: GlobalAveragePool instead of ReduceMean"


@rewrite_nodes("gemms")
def write_out_gemms(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make a Gemm of a constant matrix a MatMul and an Add: in ORT only the former has kernels for weights alone.

    It would make a Gemm of them again, which `assembly.keep_products` prevents.
    """
    op = find_linear(edit.index, node) if node.is_onnx("Gemm") else None
    if op is None or node.transposes_data or node.read_float("alpha", 1.0) != 1.0:
        return
    if node.is_transposed:
        # A matrix for each of several readers, such as the steps of a cell, would not be smaller.
        if not edit.index.is_owned(edit.index.find_input(node, 1)):
            return
        edit.set_constant(node.make_edge(1), op.weight.T)
    edit.replace_node(node, "MatMul", node.inputs[:2])
    if op.bias.any():
        edit.append(node, [("Add", node.inputs[2:], {})])
    yield f"{node.name}: MatMul instead of Gemm"


def find_pooled_axes(index: GraphIndex, node: NodeRef) -> MaybeTensor:
    """The tensor that a ReduceMean takes the mean of over all spatial axes; None for anything else."""
    if not node.is_onnx("ReduceMean"):
        return None
    x = index.find_input(node)
    rank = index.find_rank(x)
    axes = index.read_integers(node, "axes", 1)
    if rank is None or rank < 3 or axes is None or index.find_dtype(x) not in SINGLE:
        return None
    # A mean of squares is a step of a norm, which ORT makes one kernel of (RMSNorm, of rank 3 too).
    maker = index.find_onnx_producer(x, "Pow", "Mul")
    if maker is not None and (maker.op_type == "Pow" or maker.inputs[0] == maker.inputs[1]):
        return None
    return x if sorted(axes % rank) == list(range(2, rank)) else None


@rewrite_nodes("pad")
def fold_pad(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Move every Pad along spatial axes into the pads of what reads it: Convs, of zeros, or MaxPools, of -inf.

    Pad between pairs is a float kernel in ORT, and a pair on each side of it costs more than the convolution; no scale
    holds -inf. AveragePool is left alone: it counts its own padding differently from a padded input unless
    count_include_pad is set.
    """
    match = _match_pad(edit.index, node)
    if match is None:
        return
    readers, amounts = match
    for reader in readers:
        edit.read(reader.make_edge(0), node.inputs[0])
        # VALID would leave the pads out.
        edit.set_attrs(reader, {"pads": _add_pads(reader, amounts), "auto_pad": None})
        yield f"{reader.name}: pads of {node.name}"
    edit.remove_node(node)


def _match_pad(index: GraphIndex, node: NodeRef) -> tuple[NodeRefs, Amounts] | None:
    """(what reads it, spatial amounts: begins, then ends) of a Pad that can go."""
    if not node.is_onnx("Pad") or node.attrs.get("mode", "constant") != "constant":
        return None
    out = node.result
    edges = index.list_consumers(out)
    if (
        not edges
        or index.is_kept(out)
        or any(edge.scope != node.scope or edge.index for edge in edges)
    ):
        return None
    readers = tuple(index.readers(out))
    # SAME pads by the size that the Pad changes.
    plain = (
        node.is_onnx("Conv", "MaxPool") and node.padding_mode in ("NOTSET", "VALID")
        for node in readers
    )
    if not all(plain):
        return None
    amounts = pad_amounts(index, node, _find_padded_rank(index, readers))
    if amounts is None:
        return None
    half = len(amounts) // 2
    spatial = (*amounts[2:half], *amounts[half + 2 :])
    # They pad neither batch nor channels, and crop nothing.
    if any(amounts[k] for k in (0, 1, half, half + 1)) or min(spatial) < 0:
        return None
    value = find_pad_value(index, node)
    pads_alike = all(_pads_with(reader, value, spatial) for reader in readers)
    return (readers, spatial) if pads_alike else None


def _pads_with(reader: NodeRef, value: float, amounts: Amounts) -> bool:
    """True where pads of a Conv or MaxPool have this value: zero, or one that is never the largest of a window."""
    if reader.op_type == "Conv":
        return value == 0.0
    kernel = reader.attrs["kernel_shape"]
    pads = _add_pads(reader, amounts)
    # Places are counted without pads, and with them a size is rounded up otherwise.
    plain = len(reader.outputs) == 1 and not reader.attrs.get("ceil_mode", 0)
    return (
        plain
        and value <= _LOWEST
        # No window lies in pads alone, where their value would be the largest.
        and all(pad < size for pad, size in zip(pads, (*kernel, *kernel), strict=True))
    )


def _find_padded_rank(index: GraphIndex, readers: NodeRefs) -> int | None:
    """The rank of the padded tensor, from the kernels or the weights of what reads it."""
    for reader in readers:
        weight = index.find_input(reader, 1)
        rank = len(reader.attrs["kernel_shape"]) + 2 if weight is None else index.find_rank(weight)
        if rank is not None:
            return rank
    return None


def pad_amounts(index: GraphIndex, node: NodeRef, rank: int | None) -> Amounts | None:
    """The constant amounts of a Pad as [begin of every axis, end of every axis], None when computed or unclear."""
    pads = index.read_integers(node, "pads", 1)
    if pads is None:
        return None
    # Since opset 18 an input may say which axes the amounts are of.
    if index.find_input(node, 3) is None:
        return tuple(pads.tolist()) if rank is None or len(pads) == 2 * rank else None
    axes = index.input_value(node, 3)
    if axes is None or rank is None or len(pads) != 2 * axes.size:
        return None
    full = np.zeros((2, rank), np.int64)
    full[:, axes.ravel() % rank] = pads.reshape(2, -1)
    return tuple(full.ravel().tolist())


def _add_pads(conv: NodeRef, amounts: Amounts) -> list[int]:
    own = conv.attrs.get("pads") if conv.padding_mode == "NOTSET" else None
    return [a + b for a, b in zip(own or [0] * len(amounts), amounts, strict=True)]


@rewrite_nodes("axes")
def write_axes(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Write out the axes of every Pad, Resize and CenterCropPad that names constant ones of a tensor of known rank.

    Amounts, scales and sizes are then of every axis, as before opset 18. ONNX Runtime's layout optimizer (1.32) moves
    Transposes through Pad and Resize, and permutes their amounts as if they were so: beside int8 convolutions a run
    fails, or pads the wrong axes. CenterCropPad is a function of Pad.
    """
    amounts = _find_amounts(edit.index, node)
    if amounts is None:
        return
    inputs = list(node.inputs[:3] if node.op_type == "Pad" else node.inputs)
    inputs[amounts.input] = _write_amounts(edit, node, amounts)
    edit.replace_node(
        node,
        node.op_type,
        inputs,
        {key: node.attrs[key] for key in node.attrs if key != "axes"},
    )
    yield f"{node.name}: {node.op_type} of all axes"


@dataclass(frozen=True, eq=False)
class _Amounts:
    """Numbers that an input gives for some axes.

    places: of its entries among those of all axes. rest: entries of all axes where it gives none; None: the sizes that
    the tensor has.
    """

    input: int
    places: Integers
    rest: Array | None


def _find_amounts(index: GraphIndex, node: NodeRef) -> _Amounts | None:
    """The numbers of a node that names axes; None for other nodes, and where they cannot be written out."""
    if not node.is_onnx("Pad", "Resize", "CenterCropPad"):
        return None
    rank = index.find_rank(index.find_input(node))
    axes = index.input_value(node, 3) if node.op_type == "Pad" else node.attrs.get("axes")
    if not rank or axes is None:
        return None
    places = as_int64(axes).ravel() % rank
    if node.op_type == "Pad":
        return _Amounts(1, np.concatenate([places, places + rank]), np.zeros(2 * rank, np.int64))
    if node.op_type == "CenterCropPad":
        return _Amounts(1, places, _read_sizes(index, node))
    # A common scale is chosen among the axes that are named, and regions have amounts of their own.
    if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if node.attrs.get("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    if index.find_input(node, 2) is not None:
        return _Amounts(2, places, np.ones(rank, np.float32))
    return _Amounts(3, places, _read_sizes(index, node))


def _read_sizes(index: GraphIndex, node: NodeRef) -> Integers | None:
    sizes = index.find_sizes(index.find_input(node))
    return None if sizes is None else as_int64(sizes)


def _write_amounts(edit: Edit, node: NodeRef, amounts: _Amounts) -> str:
    """The name of the tensor with the entries of all axes."""
    given = edit.index.input_value(node, amounts.input)
    name = f"{node.name}/amounts"
    if given is not None and amounts.rest is not None:
        full = amounts.rest.astype(given.dtype)
        full[amounts.places] = given.ravel()
        return edit.add_constant(node.scope, name, full)
    # Amounts or sizes that are computed are put in their places at run time.
    places = edit.add_constant(node.scope, f"{name}/places", amounts.places)
    rest = (
        edit.insert_before(node, "Shape", [node.inputs[0]], f"{name}/sizes")
        if amounts.rest is None
        else edit.add_constant(node.scope, f"{name}/rest", amounts.rest)
    )
    return edit.insert_before(
        node, "ScatterElements", [rest, places, node.inputs[amounts.input]], name, attrs={"axis": 0}
    )


def read_invariants(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Let the bodies of loops read constants from outside that every step hands to the next as they are.

    tf2onnx makes a loop of a Keras LSTM and state of its weights, so that no operator in it seems to have any.
    """
    index = state.index
    # Most models have no bodies, and need no copy.
    if len(index.scopes) == 1:
        return state, PassReport(INVARIANTS)
    proto = copy_proto(state.model)
    changed = []
    for _, graph in walk_graphs(proto.graph):
        for node in graph.node:
            if node.op_type not in _LEADING or node.domain:
                continue
            ((_, body),) = iterate_subgraphs(node)
            inputs, conditions = _LEADING[node.op_type]
            # From the last on, so that places in front stay.
            for k in reversed(_find_invariants(index, index.find_node(node.name), body)):
                source = node.input[k]
                place = k - inputs
                rename_reads(body, {body.input[k].name: source})
                # Results at the end that nobody reads may be left out.
                for result in node.output[place : place + 1]:
                    rename_reads(graph, {result: source})
                    del node.output[place]
                del node.input[k], body.input[k], body.output[place + conditions]
                changed.append(f"{node.name}: reads {source} from outside")
    if changed:
        # Parts of such constants are constants now: the gates of a cell, which its steps cut out of one weight.
        state = replace(state, model=infer_shapes(fold_constants(rebuild(state.model, proto))))
    return state, PassReport(INVARIANTS, tuple(changed))


def _find_invariants(index: GraphIndex, loop: NodeRef, body: GraphProto) -> list[int]:
    """The inputs of a loop with constants that its body gives out as it reads them, in ascending order."""
    inputs, conditions = _LEADING[loop.op_type]
    end = len(loop.inputs) - loop.attrs.get("num_scan_inputs", 0)
    repeats = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
    results = [repeats.get(value.name, value.name) for value in body.output]
    hidden = {name for _, inner in walk_graphs(body) for name in list_defined(inner)}
    return [
        k
        for k in range(inputs, end)
        if index.has_constant(loop, k)
        and loop.inputs[k] not in hidden - {body.input[k].name}
        and results[k - inputs + conditions] == body.input[k].name
        and results.count(body.input[k].name) == 1
        and not any(
            index.is_kept(TensorId(result, loop.scope))
            for result in loop.outputs[k - inputs : k - inputs + 1]
        )
    ]
