"""Products as engines take them: Einsum as MatMul, stacks of constant matrices, lookups of such, factors of a Gemm.

Einsum is written as the product of matrices that it is. Engines have kernels for MatMul, in integers too; for Einsum
they have none, or those of a few equations. Axes that both operands and the result have are those of a stack of
products, those that the result has not are summed over, and all others are rows of the left operand or columns of the
right one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.arrays import Array, Mask, Shape, as_int64
from onnxq.graph import Dims, GraphIndex, NodeRef, fold_constants, infer_shapes
from onnxq.passes.base import RunContext
from onnxq.passes.linear import find_linear
from onnxq.passes.patterns import Edit, Step, rewrite_nodes
from onnxq.passes.state import FloatState, FloatStep
from onnxq.planner.requests import Requests
from onnxq.sites import Role

# Letters for the axes that an ellipsis stands for, from the last one on.
_ELLIPSIS = "..."
_MORE_LETTERS = "αβγδεζηθ"
# In the shape of a Reshape: the size that the axis has, and the one size that follows from all others.
_SAME = 0
_REST = -1
# Of a ConvTranspose by its spatial axes: how the taps along each go into a Conv's weight, with places in a block, in
# the order that what follows reads a pixel's channels, in front.
_SPREADS = {1: "rik,cok->roci", 2: "rik,sjl,cokl->rsocij"}
# Pictures, and maps of fewer channels, are as fast in float and lose less.
_FEWEST_CHANNELS = 4
# Times as many products, with the zeros of a larger kernel, as pay in integers.
_MOST_ZEROS = 2.25
# Values of a matrix; a stack of smaller ones is left: in 8 bits it would gain nothing by so many nodes.
_WORTH_A_NODE = 1 << 13


@dataclass(frozen=True)
class _Operand:
    """An input of the Einsum. axes: as it has them; order: as MatMul reads them; shape: some joined, () for none."""

    index: int
    axes: str
    order: str
    shape: Shape


@dataclass(frozen=True)
class _Contraction:
    """The product of matrices. shape: that parts the axes of its result, () for none; order: these axes.

    axes: those of the Einsum's result.
    """

    operands: Sequence[_Operand]
    shape: Shape
    order: str
    axes: str


def write_out_einsums(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Write each Einsum that is one product of matrices as MatMul."""
    edit = Edit(state.model)
    index = edit.index
    changed = []
    for node in index.nodes:
        product = (
            _find_product(index, node) if node.is_onnx("Einsum") and len(node.inputs) == 2 else None
        )
        if product is not None:
            _write_product(edit, node, product)
            changed.append(f"{node.name}: Einsum as MatMul")
    state, report = edit.finish_pass(state, "einsums", changed)
    # Constants are arranged once, and not in every run.
    return (
        replace(state, model=infer_shapes(fold_constants(state.model))) if changed else state
    ), report


def _write_product(edit: Edit, node: NodeRef, product: _Contraction) -> None:
    def transpose_axes(before: str, after: str) -> list[Step]:
        if before == after:
            return []
        return [("Transpose", (), {"perm": [before.index(axis) for axis in after]})]

    def reshape_axes(shape: Shape) -> list[Step]:
        return [edit.make_reshape(node, shape)] if shape else []

    names = []
    for operand in product.operands:
        part = f"in{operand.index}"
        name = node.inputs[operand.index]
        steps = [*transpose_axes(operand.axes, operand.order), *reshape_axes(operand.shape)]
        for op_type, others, attrs in steps:
            name = edit.insert_before(
                node, op_type, [name, *others], f"{node.name}/{part}/{op_type}", attrs=attrs
            )
        names.append(name)
    edit.replace_node(node, "MatMul", names)
    edit.append(node, [*reshape_axes(product.shape), *transpose_axes(product.order, product.axes)])


def _find_product(index: GraphIndex, node: NodeRef) -> _Contraction | None:
    """The product that an Einsum of two tensors is; None for another, or where sizes are not known that it needs."""
    equation = str(node.attrs.get("equation", ""))
    # Of another number of operands it is wrong, which ONNX Runtime says better.
    if equation.count(",") != 1:
        return None
    shapes = [index.input_shape(node, k) or () for k in (0, 1)]
    (first, second), result = _read_equation(equation, shapes)
    sizes = _collect_sizes((first, second), shapes)
    if sizes is None:
        return None
    # Columns of the result stand behind its rows, but those of a constant have a scale each.
    free = [axis for axis in result if (axis in first) != (axis in second)]
    turned = bool(free) and free[0] in second
    constant, other = (index.has_constant(node, k) for k in (0, 1))
    if constant != other:
        turned = constant
    if _turns_beside_vector(*((second, first) if turned else (first, second)), result):
        turned = not turned
    left, right = (second, first) if turned else (first, second)
    stack = [axis for axis in result if axis in left and axis in right]
    rows = "".join(axis for axis in result if axis not in right)
    columns = "".join(axis for axis in result if axis not in left)
    summed = "".join(axis for axis in left if axis in right and axis not in result)
    if not summed or {*left} != {*stack, *rows, *summed} or {*right} != {*stack, *columns, *summed}:
        return None
    # In a stack both matrices have two axes: several axes of rows, or of columns, are joined.
    if stack:
        some_rows = [rows]
        some_columns = [columns]
    else:
        # MatMul takes rows of any number of axes, and one matrix on the right.
        some_rows = [*rows]
        some_columns = [columns] if columns else []
    left_groups = [*stack, *some_rows, summed]
    right_groups = [*stack, summed, *some_columns]
    groups = [*stack, *some_rows, *some_columns]
    left_shape = _list_sizes(left_groups, left_groups, sizes)
    right_shape = _list_sizes(right_groups, right_groups, sizes)
    shape = _list_sizes(groups, "".join(groups), sizes)
    # A Reshape finds out one size by itself, not two.
    if any(reshaped.count(_REST) > 1 for reshaped in (left_shape, right_shape, shape)):
        return None
    operands = (
        _Operand(int(turned), left, "".join(left_groups), left_shape),
        _Operand(int(not turned), right, "".join(right_groups), right_shape),
    )
    return _Contraction(operands, shape, "".join(groups), result)


def _turns_beside_vector(left: str, right: str, result: str) -> bool:
    """True where a matrix on the left would be transposed in front of a vector: the vector stands on the left then.

    ONNX Runtime 1.32 fuses such a Transpose into a FusedMatMul that gives the product without it.
    """
    return len(left) == 2 and right == left[0] and right not in result


def _read_equation(equation: str, shapes: Sequence[Dims]) -> tuple[list[str], str]:
    """The axes of both operands and of the result, a letter for each."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    hidden = [
        len(dims) - len(term.replace(_ELLIPSIS, ""))
        for term, dims in zip(operands, shapes, strict=True)
    ]
    # Without an arrow the result has the axes that occur once, in alphabetical order, behind an
    # ellipsis.
    if not arrow:
        letters = terms.replace(_ELLIPSIS, "").replace(",", "")
        result = _ELLIPSIS + "".join(
            sorted(axis for axis in {*letters} if letters.count(axis) == 1)
        )
    spelled = [
        # Ellipses of different ranks are aligned at their last axes, as broadcasting does.
        term.replace(_ELLIPSIS, _MORE_LETTERS[-count:] if count > 0 else "")
        for term, count in zip((*operands, result), (*hidden, max(hidden)), strict=True)
    ]
    return spelled[:2], spelled[2]


def _collect_sizes(operands: Sequence[str], shapes: Sequence[Dims]) -> dict[str, int] | None:
    """The fixed sizes by axis; None where an operand has other axes, one twice, or one of another size."""
    sizes: dict[str, int] = {}
    for axes, dims in zip(operands, shapes, strict=True):
        if len(axes) != len(dims) or len({*axes}) < len(axes):
            return None
        for axis, size in zip(axes, dims, strict=True):
            if isinstance(size, int) and sizes.setdefault(axis, size) != size:
                return None
    return sizes


def _list_sizes(groups: Sequence[str], wanted: Sequence[str], sizes: Mapping[str, int]) -> Shape:
    """The shape that makes `wanted`, groups of axes again, of these groups; () where all are of one axis."""
    alone = next((k for k, group in enumerate(groups) if len(group) != 1), len(groups))
    if alone == len(groups):
        return ()
    known = (
        math.prod(sizes[axis] for axis in group) if {*group} <= sizes.keys() else _REST
        for group in wanted[alone:]
    )
    # A 0 copies the size at its own place, so only the leading axes that stay alone can have one.
    return (*[_SAME] * alone, *known)


def _read_stack(index: GraphIndex, node: NodeRef, k: int) -> Array | None:
    """The constant matrices that a node alone reads as its input k; None for others, and for small ones."""
    tensor = index.find_input(node, k)
    stack = index.input_value(node, k)
    if stack is None or stack.ndim < 3 or index.is_output(tensor):
        return None
    # It may be one of the graph around, as of a loop over layers.
    if len(index.list_consumers(tensor)) > 1:
        return None
    return stack if math.prod(stack.shape[-2:]) >= _WORTH_A_NODE else None


@rewrite_nodes("stacks")
def part_stacks(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make a product with a stack of constant matrices, as experts have, one for each: engines quantize matrices alone.

    In 8 bits ONNX Runtime takes .13 to .45 of the time then (4 to 16 matrices of 128 x 128 to 512 x 2048), and in
    float .6 to 1.05.
    """
    index = edit.index
    stack = _read_stack(index, node, 1) if node.is_onnx("MatMul") else None
    dims = index.input_shape(node)
    if stack is None or dims is None:
        return
    matrices = stack.reshape(-1, *stack.shape[-2:])
    axes = [axis for axis, size in enumerate(stack.shape[:-2], len(dims) - stack.ndim) if size > 1]
    deep = len(dims) >= stack.ndim
    # Axes in front of that of the matrices, where it stands right before the rows.
    front = max(len(dims) - 3, 0)
    # The same rows for all, as for the heads of an attention.
    alike = axes == [front] and dims[front] == 1 if deep else (len(dims), stack.ndim) == (2, 3)
    if alike:
        # One matrix with the columns of all.
        edit.set_constant(node.make_edge(1), np.hstack([*matrices]))
        shape = edit.make_reshape(node, (*[_SAME] * front, _REST, *stack.shape[-3::2]))
        edit.append(
            node, [shape, ("Transpose", (), {"perm": (*range(front), front + 1, front, front + 2)})]
        )
    elif deep and not axes:
        edit.set_constant(node.make_edge(1), matrices[0])
    elif deep and [dims[axis] for axis in axes] == [len(matrices)]:
        (axis,) = axes
        stored = edit.add_part(node, "axis", as_int64(axes))
        products = []
        for k, matrix in enumerate(matrices):
            part = f"{node.name}/{k}"
            rows = edit.insert_slice(node, node.inputs[0], (k, k + 1), stored, part)
            weight = edit.add_constant(node.scope, f"{node.inputs[1]}/{k}", matrix)
            products.append(edit.insert_before(node, "MatMul", [rows, weight], part))
        edit.replace_node(node, "Concat", products, {"axis": axis})
    else:
        return
    yield f"{node.name}: a MatMul for each matrix of a stack"


@rewrite_nodes("lookups")
def write_lookups(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make a GatherND of whole rows a Gather, by which tables are known: PyTorch writes `table[places]` so."""
    index = edit.index
    places = index.find_input(node, 1)
    unsqueeze = index.find_onnx_producer(places, "Unsqueeze") if node.is_onnx("GatherND") else None
    if unsqueeze is None or node.attrs.get("batch_dims", 0):
        return
    axes = index.read_integers(unsqueeze, "axes", 1)
    rank = index.find_rank(places)
    if axes is not None and rank is not None and [*axes % rank] == [rank - 1]:
        edit.replace_node(node, "Gather", [node.inputs[0], unsqueeze.inputs[0]])
        yield f"{node.name}: Gather instead of GatherND"


@rewrite_nodes("tables")
def flatten_tables(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Look the matrices of a stack up as rows of a table, as embeddings are, and give them their axes behind it.

    So exporters write experts that are chosen at run time: the weights of each token's own.
    """
    index = edit.index
    stack = _read_stack(index, node, 0) if node.looks_up(0) else None
    rank = index.find_rank(index.find_input(node, 1))
    if stack is None or rank is None:
        return
    edit.set_constant(node.make_edge(0), stack.reshape(len(stack), -1))
    edit.append(node, [edit.make_reshape(node, [*[_SAME] * rank, *stack.shape[1:]])])
    yield f"{node.name}: matrices as rows of a table"


@rewrite_nodes("addends")
def part_gemms(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Leave a Gemm of constant factors and one bias a column, which engines have in integers.

    Its factors go into weight and bias, a bias times 0, as JAX's exporter writes it, goes, and any other C is added
    behind the product.
    """
    alpha, beta = (node.attrs.get(name, 1.0) for name in ("alpha", "beta"))
    # Attributes of other types are left to ONNX Runtime's checks.
    if not node.is_onnx("Gemm") or not isinstance(alpha, float) or not isinstance(beta, float):
        return
    weight, bias = (edit.index.input_value(node, k) for k in (1, 2))
    addend = edit.index.find_input(node, 2)
    if beta == 0.0:
        edit.replace_node(node, "Gemm", node.inputs[:2], {**node.attrs, "beta": None})
        yield f"{node.name}: a bias times 0 left out"
    elif beta != 1.0 and bias is not None:
        edit.set_constant(node.make_edge(2), bias * bias.dtype.type(beta))
        edit.set_attrs(node, {"beta": None})
        yield f"{node.name}: a bias without a factor"
    elif beta == 1.0 and weight is not None and weight.ndim == 2 and addend is not None:
        columns = weight.shape[0 if node.is_transposed else 1]
        if bias is None or bias.size != columns or bias.shape[-1:] != (columns,):
            edit.append(node, [("Add", (addend.name,), {})])
            edit.replace_node(node, "Gemm", node.inputs[:2], node.attrs)
            yield f"{node.name}: a sum behind the product"
    if alpha != 1.0 and weight is not None:
        edit.set_constant(node.make_edge(1), weight * weight.dtype.type(alpha))
        edit.set_attrs(node, {"alpha": None})
        yield f"{node.name}: a product without a factor"


def write_out_upsampling(ctx: RunContext, state: FloatState) -> FloatStep:
    """Write out each ConvTranspose for integers, but for those that a rule leaves float, where it would be slower."""
    edit = Edit(state.model)
    index = edit.index
    nodes = [node for node in index.nodes if node.is_onnx("ConvTranspose")]
    changed: list[str] = []
    # Most networks have none, and rules that name a path walk through the graph.
    if nodes:
        requests = Requests(ctx.config, index)
        for node in nodes:
            reads = zip((Role.ACTIVATION, Role.WEIGHT), index.list_reads(node), strict=False)
            if requests.find_float_rule(node, reads) is None:
                changed += _write_out_transposed(edit, node)
    return edit.finish_pass(state, "upsampling", changed)


def _write_out_transposed(edit: Edit, node: NodeRef) -> Iterator[str]:
    """Make a ConvTranspose without a stride a Conv, and one with a stride a Conv and a DepthToSpace, all in int8.

    The result is parted into blocks of the stride, whose places are channels of the Conv (Shi et al. 2016). Its kernel
    has the taps that reach a block: 1 x 1 for windows side by side, 3 x 3 for 4 x 4 and stride 2. An activation that
    follows stays behind the Conv, and is computed with it.
    """
    op = find_linear(edit.index, node)
    if op is None or op.weight.dtype != np.float32 or op.weight.size < _WORTH_A_NODE:
        return
    channels, *kernel = op.weight.shape[1:]
    rank = len(kernel)
    ones = (1,) * rank
    sizes = {"strides": ones, "output_padding": (0,) * rank, "pads": (0, 0) * rank}
    plain = {"auto_pad": "NOTSET", "dilations": ones, "group": 1, "kernel_shape": tuple(kernel)}
    # As text: attributes of other types, which are left to ONNX Runtime's checks, may be arrays.
    changed = any(
        str(value) != str(plain.get(name))
        for name, value in node.attrs.items()
        if name not in sizes
    )
    values = np.hstack([np.ravel(node.attrs.get(*size)) for size in sizes.items()])
    if changed or rank not in _SPREADS or values.dtype.kind != "i" or values.size != 4 * rank:
        return
    strides, padding, before, after = values.reshape(4, rank)
    step = int(strides[0])
    if step < 1 or channels < _FEWEST_CHANNELS:
        return
    # The result has whole blocks, perhaps more or fewer of them than the input has pixels.
    blocks, rest = np.divmod(kernel - strides - before - after + padding, step)
    if rest.any() or (strides != step).any():
        return
    each = (_spread_taps(size, step, pad) for size, pad in zip(kernel, before, strict=True))
    spreads, fronts, backs = zip(*each, strict=True)
    weight = np.einsum(_SPREADS[rank], *spreads, op.weight, optimize=True)
    pads = (*fronts, *blocks + backs)
    if min(pads) < 0 or weight.size > _MOST_ZEROS * op.weight.size:
        return
    biased = op.bias.any()
    edit.replace_node(node, "Conv", node.inputs if biased else node.inputs[:2], {"pads": pads})
    edit.set_constant(node.make_edge(1), weight.reshape(-1, *weight.shape[rank + 1 :]))
    if biased:
        bias = np.tile(op.bias, step**rank).astype(weight.dtype)
        edit.set_constant(node.make_edge(2), bias)
    activation = edit.index.find_follower(node, "Relu", "LeakyRelu", "Clip")
    edit.append(node, _join_places(edit, node, rank, step, channels), activation)
    yield f"{node.name}: Conv instead of ConvTranspose"


def _join_places(edit: Edit, node: NodeRef, rank: int, step: int, channels: int) -> list[Step]:
    """The nodes that put the places of each block, which are channels, where they belong."""
    if step == 1:
        return []
    if rank == 2:
        return [("DepthToSpace", (), {"blocksize": step})]
    return [
        edit.make_reshape(node, [_SAME, step, channels, _REST]),
        ("Transpose", (), {"perm": (0, 2, 3, 1)}),
        edit.make_reshape(node, [_SAME, channels, _REST]),
    ]


def _spread_taps(kernel: int, step: int, before: int) -> tuple[Mask, int, int]:
    """Along one axis: how values of a transposed kernel are taps of a Conv, [places, taps, kernel], and its two pads.

    before: the ConvTranspose's pad in front.
    """
    offsets, between = np.divmod(np.arange(step)[:, None] + before - np.arange(kernel), step)
    reached = between == 0
    first = int(offsets[reached].min())
    last = int(offsets[reached].max())
    taps = np.arange(first, last + 1)[:, None]
    return reached[:, None] & (offsets[:, None] == taps), -first, last
