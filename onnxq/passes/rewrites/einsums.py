"""Einsum of two tensors, written as the product of matrices that it is.

Engines have kernels for MatMul, in integers too; for Einsum they have none, or those of a few equations. Axes that both
operands and the result have are those of a stack of products, those that the result has not are summed over, and all
others are rows of the left operand or columns of the right one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxq.arrays import Shape
from onnxq.graph import Dims, GraphIndex, NodeRef, fold_constants, infer_shapes
from onnxq.passes.base import RunContext
from onnxq.passes.patterns import Edit, Step
from onnxq.passes.state import FloatState, FloatStep

# Letters for the axes that an ellipsis stands for, from the last one on.
_ELLIPSIS = "..."
_MORE_LETTERS = "αβγδεζηθ"
# In the shape of a Reshape: the size that the axis has, and the one size that follows from all others.
_SAME = 0
_REST = -1


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

    def reshape_axes(part: str, shape: Shape) -> list[Step]:
        if not shape:
            return []
        stored = edit.add_integers(node.scope, f"{node.name}/{part}/shape", shape)
        return [("Reshape", (stored,), {})]

    names = []
    for operand in product.operands:
        part = f"in{operand.index}"
        name = node.inputs[operand.index]
        steps = [*transpose_axes(operand.axes, operand.order), *reshape_axes(part, operand.shape)]
        for op_type, others, attrs in steps:
            name = edit.insert_before(
                node, op_type, [name, *others], f"{node.name}/{part}/{op_type}", attrs=attrs
            )
        names.append(name)
    edit.replace_node(node, "MatMul", names)
    edit.append(
        node, [*reshape_axes("out", product.shape), *transpose_axes(product.order, product.axes)]
    )


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
    # Columns of the result stand behind its rows.
    free = [axis for axis in result if (axis in first) != (axis in second)]
    turned = bool(free) and free[0] in second
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
