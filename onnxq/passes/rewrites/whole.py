"""Rewrites for targets that take a whole graph in integers: forms of operators whose integer kernels are exact."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from onnx import TensorProto

from onnxq.arrays import Array, as_int64
from onnxq.graph import GraphIndex, NodeRef, infer_shapes, walk_from
from onnxq.graph.convert import write_out_operators
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.linear import find_linear
from onnxq.passes.patterns import Edit, rewrite_nodes
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import Edge, TensorId

# Operators between the constants of a mask and the Softmax that reads it.
_MASKING = (
    "Add",
    "And",
    "Cast",
    "Concat",
    "Div",
    "Equal",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Max",
    "Mul",
    "Neg",
    "Reshape",
    "Slice",
    "Squeeze",
    "Sub",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Where",
)
# From here on a value means "never", and what stands for it: behind a softmax e**-64 is nothing in float32, either. A
# range that holds it has steps of .001 in 16 bits; one that holds -3e38 has nothing else.
_NEVER = 1e3
_FAR = 64.0
# Rows of maps of which the HTP computes x · Sigmoid(x) in 16 bits wrongly.
_WRONG_ROWS = range(9, 13)


def write_out_attention(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Write every Attention as the products, masks and Softmax of its definition, which the NPU has kernels for."""
    names = [node.name for node in GraphIndex(state.model).nodes if node.is_onnx("Attention")]
    if not names:
        return state, PassReport("attention_parts")
    model = write_out_operators(infer_shapes(state.model), "Attention")
    left = GraphIndex(model).named
    changed = tuple(
        f"{name}: the operators of its definition" for name in names if name not in left
    )
    return replace(state, model=model), PassReport("attention_parts", changed)


def bound_masks(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Give masks in front of a Softmax a finite value that a scale can hold beside the scores."""
    edit = Edit(state.model)
    index = edit.index
    changed = []
    softmaxes = [node for node in index.nodes if node.is_onnx("Softmax")]
    list_masking = partial(_list_masking, index)
    masking = walk_from(softmaxes, list_masking)
    infinite = set()
    for node in index.nodes:
        for edge, value in _find_far_constants(index, node) if node in masking else ():
            far = abs(value) > _NEVER
            bounded = np.where(far, np.sign(value) * _FAR, value).astype(value.dtype)
            edit.set_constant(edge, bounded)
            changed.append(f"{edge.node}: {value.min():.3g} becomes {-_FAR:g}")
            if np.isinf(value).any():
                infinite.add(node)
    for softmax in softmaxes if infinite else ():
        if not infinite.isdisjoint(walk_from([softmax], list_masking)):
            changed += _test_masked_rows(edit, softmax)
    return edit.finish_pass(state, "masks", changed)


def _test_masked_rows(edit: Edit, softmax: NodeRef) -> Iterator[str]:
    """Let what looks for NaN behind a Softmax look for rows in front of it in which everything is masked.

    torch exports attention so: of -inf alone a Softmax makes NaN, which a Where replaces by zeros; of finite masks it
    makes none. Yields what changed.
    """
    for node in edit.index.readers(softmax.result):
        if node.is_onnx("IsNaN") and node.scope == softmax.scope:
            scores = softmax.inputs[0]
            # A score that is not masked is far above half of what masks hold.
            largest = edit.insert_largest(
                node, scores, softmax.attrs.get("axis", -1), f"{scores}/largest"
            )
            bound = edit.add_float(node, "masked", -_FAR / 2)
            edit.replace_node(node, "Less", [largest, bound])
            yield f"{node.name}: looks for rows that are masked as a whole"


@rewrite_nodes("masked_rows")
def level_masked_rows(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Let a Softmax see no difference in rows in which everything is masked by a value added to the scores.

    Beside -3e38 scores vanish, so that such a row is even; beside what `bound_masks` writes they do not.
    """
    if not node.is_onnx("Softmax"):
        return
    masking = walk_from([node], partial(_list_masking, edit.index))
    if any(any(_find_far_constants(edit.index, source)) for source in masking):
        floor = edit.add_float(node, "least", -_FAR / 2)
        scores = node.inputs[0]
        limited = edit.insert_before(node, "Max", [scores, floor], f"{scores}/limited")
        edit.replace_node(node, "Softmax", [limited], node.attrs)
        yield f"{node.name}: rows that are masked as a whole stay even"


def _list_masking(index: GraphIndex, node: NodeRef) -> Iterator[NodeRef]:
    """The operators of a mask that make what a node reads."""
    for tensor in index.list_reads(node):
        maker = None if index.is_constant(tensor) else index.find_producer(tensor)
        if maker is not None and maker.op_type in _MASKING and not index.is_kept(maker.result):
            yield maker


def _find_far_constants(index: GraphIndex, node: NodeRef) -> Iterator[tuple[Edge, Array]]:
    """The inputs that read a constant with values beyond any score, with its values."""
    for edge in node.list_edges():
        value = index.input_value(node, edge.index)
        if value is None or value.dtype.kind != "f" or abs(value).max(initial=0) <= _NEVER:
            continue
        # Scores themselves may be scaled by large numbers, but a mask of ones and zeros by a negative one.
        scales = node.op_type == "Div" or (node.op_type == "Mul" and value.max() > 0)
        if not scales:
            yield edge, value


@rewrite_nodes("splits")
def cut_splits(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make every Split of constant sizes as many Slices, each of which has one result to quantize."""
    index = edit.index
    sizes = _read_sizes(index, node) if node.is_onnx("Split") else None
    if sizes is None or any(map(index.is_kept, node.results)):
        return
    axis = edit.add_part(node, "axis", as_int64([node.attrs.get("axis", 0)]))
    ends = sizes.cumsum()
    for k, span in enumerate(zip(ends - sizes, ends, strict=True)):
        if node.outputs[k]:
            part = edit.insert_slice(node, node.inputs[0], span, axis, node.outputs[k])
            edit.redirect_readers(node.make_result(k), part)
    edit.remove_node(node)
    yield f"{node.name}: {len(sizes)} Slices instead of a Split"


def _read_sizes(index: GraphIndex, node: NodeRef) -> np.ndarray | None:
    """The sizes of a Split's results; None where they are not known."""
    sizes = index.read_integers(node, "split", 1)
    if sizes is not None:
        return sizes
    if any(node.inputs[1:]):  # computed ones
        return None
    count = len(node.outputs)
    shape = index.input_shape(node)
    size = None if shape is None else shape[node.attrs.get("axis", 0)]
    if not isinstance(size, int):
        return None
    # Since opset 18 the last part may be smaller than the others.
    largest = -(-size // count)
    return as_int64([min(largest, size - k * largest) for k in range(count)])


@rewrite_nodes("reciprocals")
def replace_reciprocals(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make every Reciprocal a division: of the factor that it is multiplied by, or of 1.

    The HTP computes a Reciprocal of 16 bits far off where values are below .1, and a division right (facts in
    docs/engines.md).
    """
    index = edit.index
    floats = index.find_dtype(index.find_input(node)) == TensorProto.FLOAT
    if not (node.is_onnx("Reciprocal") and floats):
        return
    product, at = index.find_reader(node.result, "Mul") or (None, 0)
    if product is None:
        edit.replace_node(node, "Div", [edit.add_float(node, "one", 1.0), node.inputs[0]])
    else:
        edit.replace_node(product, "Div", [product.inputs[1 - at], node.inputs[0]])
        edit.remove_node(node)
    yield f"{(product or node).name}: a division"


@rewrite_nodes("pool_pads")
def pad_pools(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Give every AveragePool that rounds its size up the pads that this stands for.

    The HTP computes windows that reach beyond the end wrongly, and those with pads right (facts in docs/engines.md). A
    pool that counts pads of its own keeps its form: it would count the others, too.
    """
    pads = (
        _find_rounded_pads(edit.index, node)
        if node.is_onnx("AveragePool") and node.attrs.get("ceil_mode")
        else None
    )
    if pads is not None:
        # Places beyond the end never count, so pads in their stead must not, either.
        edit.set_attrs(node, {"pads": pads, "ceil_mode": None, "count_include_pad": None})
        yield f"{node.name}: pads of the windows that reach beyond the end"


def _find_rounded_pads(index: GraphIndex, node: NodeRef) -> list[int] | None:
    """The pads with which a pool has its size without rounding up; None where none are alike."""
    kernel = np.asarray(node.attrs["kernel_shape"])
    pads = node.attrs.get("pads") or [0] * (2 * len(kernel))
    counted = any(pads) and node.attrs.get("count_include_pad")
    before = index.find_sizes(index.find_input(node))
    after = index.find_sizes(node.result)
    if counted or node.padding_mode != "NOTSET" or before is None or after is None:
        return None
    strides, dilations = (node.attrs.get(name) or [1] for name in ("strides", "dilations"))
    # Windows beyond the end take the place of the pads there, whatever these are.
    begins = pads[: len(kernel)]
    reach = (np.asarray(after[2:]) - 1) * strides + (kernel - 1) * dilations + 1
    ends = reach - before[2:] - begins
    # ONNX has no window of pads alone.
    return [*begins, *np.maximum(ends, 0).tolist()] if (ends < kernel).all() else None


@rewrite_nodes("swishes")
def flatten_swishes(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Compute x · Sigmoid(x) of a map of 9 to 12 rows on one row of all its pixels.

    The HTP joins both to one kernel, whose 16-bit form is wrong for so many rows (facts in docs/engines.md).
    """
    index = edit.index
    product = index.find_follower(node, "Mul") if node.is_onnx("Sigmoid") else None
    sizes = index.find_sizes(node.result) or ()
    if product is None or len(sizes) != 4 or sizes[2] not in _WRONG_ROWS:
        return
    x = node.inputs[0]
    if x in product.inputs:
        pixels = edit.insert_reshape(node, x, [*sizes[:2], 1, -1], f"{x}/row")
        edit.replace_node(node, "Sigmoid", [pixels])
        edit.replace_node(product, "Mul", [pixels, node.outputs[0]])
        edit.append(product, [edit.make_reshape(product, sizes)])
        yield f"{product.name}: one row of pixels"


def fuse_biases(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Make every MatMul with a constant bias behind it a Gemm, whose sum is rounded once, with its bias in it.

    Reshapes stand around it where it has more than two axes, behind the Relu or Clip that such an engine takes up.
    """
    edit = Edit(state.model)
    index = edit.index
    changed = []
    matrices = {}
    for node in index.nodes:
        op = find_linear(index, node) if node.is_onnx("MatMul") else None
        if op is None or op.bias_edge is None:
            continue
        last = op.last
        shape = index.find_sizes(last.result)
        # The Reshape behind the Gemm states every size. In front of a Log, which is float, a Gemm in float16 loses what
        # is added: 7 dB instead of 35.
        if shape is None or index.find_reader(last.result, "Log"):
            continue
        x = node.inputs[0]
        key = TensorId(x, node.scope)
        # Query, key and value read one tensor, and share the Reshape in front.
        if len(shape) > 2 and key not in matrices:
            sizes = [-1, len(op.weight)]
            matrices[key] = edit.insert_reshape(node, x, sizes, f"{x}/matrix")
        bias = np.broadcast_to(op.bias, op.channels).astype(op.weight.dtype)
        held = edit.add_part(node, "bias", bias)
        edit.replace_node(node, "Gemm", [matrices.get(key, x), node.inputs[1], held])
        edit.absorb_chain(node, [last])
        if len(shape) > 2:
            # Behind the Relu or Clip, which the Gemm's kernel takes up.
            clip = index.find_follower(last, "Relu", "Clip")
            gemm = replace(node, outputs=last.outputs)
            edit.append(gemm, [edit.make_reshape(node, shape)], clip)
        changed.append(f"{node.name}: took in {last.name}")
    return edit.finish_pass(state, "biases", changed)
