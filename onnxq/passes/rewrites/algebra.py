"""Scalar arithmetic around one tensor, read as formulas so that every spelling of an activation looks the same.

An activation chain is  k·x·(c·A(P(x)) + d)  or  c·A(P(x)): an anchor A (Erf, Tanh, Sigmoid, HardSigmoid or a clamp),
a polynomial P with constant coefficients in front of it, and scalar arithmetic, perhaps a product with x, behind it.
`polynomial` reads the front, `walk` the back; activations.py knows which numbers make which activation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from onnxq.graph import NodeRef
from onnxq.passes.view import View
from onnxq.sites import TensorId

Poly = dict[int, float]
# Of Gelu's approximation by tanh; no other activation has as many.
_MAX_DEGREE = 3
# Nodes in a row: an activation written out has six or seven, and a search without an end would be of whole networks.
_MAX_DEPTH = 10


@dataclass
class Used:
    """The sources of a formula: nodes of one scope, the tensors they write, the largest rank of a constant."""

    scope: str
    nodes: set[str] = field(default_factory=set)
    tensors: set[TensorId] = field(default_factory=set)
    rank: int = 0

    def take(self, view: View, node: NodeRef, rank: int = 0) -> None:
        """Add a node; rank: of the constant it reads."""
        self.nodes.add(node.name)
        self.tensors.add(view.output(node))
        self.rank = max(self.rank, rank)

    def merge(self, other: Used) -> None:
        """Add all that another formula was read from."""
        self.nodes |= other.nodes
        self.tensors |= other.tensors
        self.rank = max(self.rank, other.rank)


def polynomial(view: View, at: TensorId | None, x: TensorId, used: Used, depth: int = 0) -> Poly | None:
    """`at` as {power: coefficient} in x, up to x³; None when it is anything else."""
    if at is None or depth > _MAX_DEPTH:
        return None
    if at == x:
        return {1: 1.0}
    node = view.producer(at, "Add", "Sub", "Mul", "Div", "Pow", "Neg")
    if node is None or node.scope != used.scope:
        return None
    terms = [_operand(view, node, k, x, used, depth) for k in range(len(node.inputs))]
    # Of constants alone it says nothing about x, whatever else may be computed from it.
    if any(term is None for term in terms) or all(set(term or {}) <= {0} for term in terms):
        return None
    ranks = [found[1] for k in range(len(node.inputs)) if (found := view.scalar(node, k)) is not None]
    result = _combine(node.op_type, [term for term in terms if term is not None])
    if result is not None:
        used.take(view, node, max(ranks, default=0))
    return result


def _operand(view: View, node: NodeRef, k: int, x: TensorId, used: Used, depth: int) -> Poly | None:
    constant = view.scalar(node, k)
    if constant is not None:
        return {0: constant[0]}
    return polynomial(view, view.tensor(node, k), x, used, depth + 1)


def _combine(op: str, terms: list[Poly]) -> Poly | None:
    if op == "Neg":
        return {power: -value for power, value in terms[0].items()}
    left, right = terms
    if op in ("Add", "Sub"):
        sign = 1.0 if op == "Add" else -1.0
        return {p: left.get(p, 0.0) + sign * right.get(p, 0.0) for p in sorted({*left, *right})}
    if op == "Mul":
        return _times(left, right)
    # Division by x, and x in the exponent, are no polynomials.
    if set(right) != {0}:
        return None
    if op == "Div":
        return {p: value / right[0] for p, value in left.items()} if right[0] else None
    if right[0] not in (1.0, 2.0, 3.0):
        return None
    power: Poly | None = left
    for _ in range(int(right[0]) - 1):
        power = None if power is None else _times(power, left)
    return power


def _times(left: Poly, right: Poly) -> Poly | None:
    result: Poly = {}
    for p, a in left.items():
        for q, b in right.items():
            result[p + q] = result.get(p + q, 0.0) + a * b
    return result if max(result) <= _MAX_DEGREE else None


def close(poly: Poly, wanted: Poly, tol: float) -> bool:
    """True when every coefficient is the wanted one within `tol`, relative to its own size (absolute for zeros)."""
    return all(
        abs(poly.get(p, 0.0) - wanted.get(p, 0.0)) <= tol * (abs(wanted.get(p, 0.0)) or 1.0) for p in {*poly, *wanted}
    )


def bases(view: View, at: TensorId, scope: str) -> list[TensorId]:
    """The tensors that `at` may be written in: itself, then back through `scope`'s scalar arithmetic, nearest first."""
    found = [at]
    for _ in range(_MAX_DEPTH):
        node = view.producer(found[-1], "Add", "Sub", "Mul", "Div", "Neg")
        if node is None or node.scope != scope:
            break
        operands = [view.tensor(node, k) for k in range(len(node.inputs)) if view.scalar(node, k) is None]
        if len(operands) != 1 or operands[0] is None:
            break
        found.append(operands[0])
    return found


@dataclass(frozen=True)
class Tail:
    """The nodes behind an anchor up to `last`: scale·x·A + shift·x with a factor x, scale·A + shift without."""

    last: NodeRef
    scale: float
    shift: float
    factor: TensorId | None
    poly: Poly
    used: Used


def walk(view: View, anchor: NodeRef, inner: TensorId, front: Used) -> list[Tail]:
    """Every tail of an anchor, shortest first; inner: the anchor's argument, front: the anchor's own nodes.

    Without a factor the argument is written in `inner` itself; callers choose another base if they like.
    """
    state = Tail(anchor, 1.0, 0.0, None, {1: 1.0}, front)
    tails = [state]
    for _ in range(_MAX_DEPTH):
        reader = view.sole_reader(view.output(state.last))
        following = None if reader is None or reader[0].domain else _follow(view, state, reader, inner)
        if following is None:
            break
        state = following
        tails.append(state)
    return tails


def _follow(view: View, state: Tail, reader: tuple[NodeRef, int], inner: TensorId) -> Tail | None:
    node, k = reader
    if node.op_type not in ("Mul", "Div", "Add", "Sub") or len(node.inputs) != 2:
        return None
    constant = view.scalar(node, 1 - k)
    if constant is None:
        return _product(view, state, node, k, inner) if node.op_type == "Mul" and state.factor is None else None
    value, rank = constant
    scale, shift = state.scale, state.shift
    if node.op_type == "Mul" or (node.op_type == "Div" and k == 0 and value):
        value = value if node.op_type == "Mul" else 1.0 / value
        scale, shift = scale * value, shift * value
    # Behind the product with x a constant is no shift of the anchor any more.
    elif state.factor is None and node.op_type == "Add":
        shift += value
    elif state.factor is None and node.op_type == "Sub":
        sign = 1.0 if k == 0 else -1.0
        scale, shift = sign * scale, sign * (shift - value)
    else:
        return None
    if not np.isfinite((scale, shift)).all():
        return None
    return replace(state, last=node, scale=scale, shift=shift, used=_with(view, state.used, node, rank))


def _product(view: View, state: Tail, node: NodeRef, k: int, inner: TensorId) -> Tail | None:
    """The product with x, where the other operand is x or a scalar multiple of it."""
    other = view.tensor(node, 1 - k)
    if other is None:
        return None
    for x in bases(view, other, node.scope):
        used = _with(view, state.used, node, 0)
        poly = polynomial(view, inner, x, used)
        factor = polynomial(view, other, x, used)
        if poly is not None and factor is not None and set(factor) <= {1}:
            size = factor[1]
            return Tail(node, state.scale * size, state.shift * size, x, poly, used)
    return None


def _with(view: View, used: Used, node: NodeRef, rank: int) -> Used:
    # A copy: the shorter tails stay as they are.
    copy = Used(used.scope, set(used.nodes), set(used.tensors), used.rank)
    copy.take(view, node, rank)
    return copy
