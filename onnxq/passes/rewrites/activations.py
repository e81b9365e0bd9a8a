"""Activation chains become one node: HardSwish, HardSigmoid, Gelu, and for ORT SiLU as com.microsoft.QuickGelu.

A chain between two pairs costs ORT one float kernel a node, and the DequantizeLinear in front of it is copied for each
of its readers, which also hides the chain from ORT's own fusions. Conv 3x3, 64 channels, 28x28, four layers, float ÷
int8: hard-swish chain 2.3, HardSwish 2.7; GELU by Erf 2.0, Gelu 2.4; SiLU chain 2.35, Sigmoid and Mul both quantized
2.56, QuickGelu 2.77 (Relu: 2.9). 1x1 convolutions: 0.65, 0.96; 0.48, 0.71; 0.69, 0.83, 1.06 (1.2).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.polynomial.polynomial import polyadd, polymul, polypow, polysub
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.arrays import are_finite
from onnxq.backends import find_target
from onnxq.graph import GraphIndex, NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.linear import ARITHMETIC, read_arithmetic
from onnxq.passes.patterns import SINGLE, Replacement, apply_replacements
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import MaybeTensor, TensorId

# Gelu's two forms, Hendrycks and Gimpel 2016 (https://arxiv.org/abs/1606.08415): x/2·(1 + erf(x/√2)), and
# x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
_ERF = (0.0, 1 / math.sqrt(2))
_TANH = (0.0, math.sqrt(2 / math.pi), 0.0, math.sqrt(2 / math.pi) * 0.044715)
# How far a constant may stand from its mathematical value by rounding (relative): a unit in the last place of these
# types; of float32 some.
_TOLERANCES: Mapping[int, float] = {TensorProto.FLOAT16: 1e-3, TensorProto.BFLOAT16: 8e-3}
_CLAMPS = ("Clip", "Relu", "Min", "Max")
# Clip's bounds default to the type's own limits, which are no bounds.
_MOST = 1e30


@dataclass(frozen=True)
class _Anchor:
    """The function in the middle: kind, its argument inner·slope + offset, bounds of a clamp, the node it ends in."""

    kind: str
    node: NodeRef
    inner: TensorId
    used: Used
    low: float = -math.inf
    high: float = math.inf
    slope: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class _Single:
    """The one node that says the same."""

    op_type: str
    opset: int
    attrs: Mapping[str, float | str] = field(default_factory=dict)
    domain: str = ""


def fuse_activations(ctx: RunContext, state: FloatState) -> FloatStep:
    """Every chain that computes one of the functions above, in any spelling, replaced by its node.

    But by none that the target has no kernel for.
    """
    computes = state.types.computes
    unknown = find_target(ctx.config.target).no_kernel
    return apply_replacements(
        state, "activations", lambda index: _find_activations(index, computes, unknown)
    )


def _find_activations(
    index: GraphIndex, computes: int, unknown: Container[str]
) -> list[Replacement]:
    found = []
    taken = set[str]()
    for node in index.nodes:
        anchor = None if node.name in taken else _find_anchor(index, node)
        match = None if anchor is None else _match_activation(index, anchor, computes, unknown)
        if match is not None and not match.nodes & taken:
            found.append(match)
            taken |= match.nodes
    return found


def _find_anchor(index: GraphIndex, node: NodeRef) -> _Anchor | None:
    if node.domain or not node.inputs:
        return None
    used = Used(node.scope)
    if node.op_type in ("Erf", "Tanh", "Sigmoid", "HardSigmoid"):
        inner = index.find_input(node)
        used.add_node(node)
        if inner is None:
            return None
        if node.op_type != "HardSigmoid":
            return _Anchor(node.op_type, node, inner, used)
        # By ONNX's defaults clamp(0.2 x + 0.5, 0, 1).
        slope = node.read_float("alpha", 0.2)
        return _Anchor("clamp", node, inner, used, 0.0, 1.0, slope, node.read_float("beta", 0.5))
    return _find_clamp(index, node, used)


def _find_clamp(index: GraphIndex, node: NodeRef, used: Used) -> _Anchor | None:
    """Clip, Relu, Min and Max with scalars, as many as follow each other, as one clamp."""
    if node.op_type not in _CLAMPS:
        return None
    follower = index.find_follower(node, *_CLAMPS)
    # Only the last of a row is looked at, and the others from there.
    if follower is not None and _read_bounds(index, follower) is not None:
        return None
    low = -math.inf
    high = math.inf
    at = node
    inner = None
    while (bounds := _read_bounds(index, at)) is not None:
        # The bounds of a clamp as those behind it let them through.
        low, high = np.clip(bounds[:2], low, high).tolist()
        used.add_node(at, bounds[3])
        inner = index.find_input(at, bounds[2])
        before = index.find_onnx_producer(inner, *_CLAMPS)
        if before is None or before.scope != node.scope or index.find_reader(inner) is None:
            break
        at = before
    if inner is None or math.isinf(low) or math.isinf(high):
        return None
    return _Anchor("clamp", node, inner, used, low, high)


def _read_bounds(index: GraphIndex, node: NodeRef) -> tuple[float, float, int, int] | None:
    """(low, high, data input, rank of the constant) of one clamping node with constant bounds."""
    if node.op_type in ("Relu", "Clip"):
        ends = index.read_clip(node)
        if ends is None:
            return None
        # Exporters write the largest float where there is no bound.
        low, high = (end if abs(end) < _MOST else math.copysign(math.inf, end) for end in ends)
        return low, high, 0, 0
    if node.op_type not in ("Min", "Max") or len(node.inputs) != 2:
        return None
    k, bound = index.read_operands(node)
    if bound is None or index.read_scalar(node, k) is not None:
        return None
    low, high = (-math.inf, bound[0]) if node.op_type == "Min" else (bound[0], math.inf)
    return low, high, k, bound[1]


def _match_activation(
    index: GraphIndex, anchor: _Anchor, computes: int, unknown: Container[str]
) -> Replacement | None:
    """The longest tail that makes a known activation."""
    # A shorter one may be known as well: the HardSigmoid inside a HardSwish.
    for tail in reversed(_list_tails(index, anchor)):
        readings = [tail] if tail.factor is not None else _list_readings(index, anchor, tail)
        for reading in readings:
            x = reading.factor
            if x is None:
                continue
            single = _recognise(
                anchor, reading, tail.factor is not None, index.find_dtype(x), computes
            )
            if single is None:
                continue
            last = reading.last
            used = reading.used
            # Constants that broadcast x would be lost, and tensors that others read must stay.
            nodes = frozenset(used.results)
            inner = {*used.results.values()} - {last.result}
            whole = used.rank <= index.find_least_rank(x) and index.are_private(inner, nodes)
            name = f"{single.domain}.{single.op_type}".lstrip(".")
            if whole and name not in unknown:
                return Replacement(
                    last, nodes, single.op_type, (x,), single.attrs, single.domain, single.opset
                )
    return None


def _list_readings(index: GraphIndex, anchor: _Anchor, tail: Tail) -> list[Tail]:
    """The tail written in each tensor its argument may come from, the farthest first."""
    readings = []
    for x in reversed(list_bases(index, anchor.inner, anchor.node.scope)):
        used = Used(anchor.node.scope)
        poly = read_polynomial(index, anchor.inner, x, used)
        if poly is not None:
            used.add_formula(tail.used)
            readings.append(replace(tail, factor=x, poly=poly, used=used))
    return readings


def _recognise(
    anchor: _Anchor, tail: Tail, product: bool, dtype: int, computes: int
) -> _Single | None:
    """The single node of scale·A(P) + shift, times x when it is a product.

    computes: the narrow ONNX type that the model came in, whose constants are rounded to it; 0 for float32.
    """
    if dtype not in SINGLE:
        return None
    tol = _TOLERANCES.get(computes or dtype, 1e-6)
    if anchor.kind == "clamp":
        return _recognise_clamp(anchor, tail, product, tol)
    if not product:
        return None
    behind = (tail.shift, tail.scale)
    halves = is_close(behind, (0.5, 0.5), tol)
    if anchor.kind == "Erf" and halves and is_close(tail.poly, _ERF, tol):
        return _Single("Gelu", 20)
    if anchor.kind == "Tanh" and halves and is_close(tail.poly, _TANH, tol):
        return _Single("Gelu", 20, {"approximate": "tanh"})
    plain = is_close(behind, (0.0, 1.0), tol) and _is_multiple(tail.poly)
    if anchor.kind == "Sigmoid" and plain and dtype == TensorProto.FLOAT:
        # The slope as ORT's kernel holds it, in float32.
        return _Single("QuickGelu", 1, {"alpha": float(np.float32(tail.poly[1]))}, "com.microsoft")
    return None


def _recognise_clamp(anchor: _Anchor, tail: Tail, product: bool, tol: float) -> _Single | None:
    ends = (tail.scale * anchor.low, tail.scale * anchor.high, tail.shift)
    if len(tail.poly) != 2 or not is_close(ends, (0.0, 1.0), tol):
        return None
    beta, alpha = tail.scale * polyadd(anchor.slope * tail.poly, [anchor.offset])
    if product:
        # HardSwish is x · clamp(x / 6 + 0.5, 0, 1).
        return _Single("HardSwish", 14) if is_close((beta, alpha), (0.5, 1 / 6), tol) else None
    # A plain clip, or there already.
    if not alpha or not beta or tail.last.op_type == "HardSigmoid":
        return None
    return _Single(
        "HardSigmoid", 6, {"alpha": float(np.float32(alpha)), "beta": float(np.float32(beta))}
    )


# An activation chain is  k·x·(c·A(P(x)) + d)  or  c·A(P(x)): an anchor A (Erf, Tanh, Sigmoid, HardSigmoid or a clamp),
# a polynomial P with constant coefficients in front of it, and scalar arithmetic, perhaps a product with x, behind it.
# Read as formulas, every spelling of an activation looks the same: `read_polynomial` reads the front, `_list_tails` the
# back; `fuse_activations` knows which numbers make which activation.
# A polynomial by its coefficients, that of the lowest power first.
Poly = NDArray[np.floating[Any]]
# Of Gelu's approximation by tanh; no other activation has as many.
_MAX_DEGREE = 3
# Nodes in a row: an activation written out has six or seven, and a search without an end would be of whole networks.
_MAX_DEPTH = 10


@dataclass
class Used:
    """The sources of a formula: nodes of one scope with the tensors they write, the largest rank of a constant."""

    scope: str
    results: dict[str, TensorId] = field(default_factory=dict)
    rank: int = 0

    def add_node(self, node: NodeRef, rank: int = 0) -> None:
        """Add a node; rank: of the constant it reads."""
        self.results[node.name] = node.result
        self.rank = max(self.rank, rank)

    def add_formula(self, other: Used) -> None:
        """Add all that another formula was read from."""
        self.results |= other.results
        self.rank = max(self.rank, other.rank)


def read_polynomial(
    index: GraphIndex, at: MaybeTensor, x: TensorId, used: Used, depth: int = 0
) -> Poly | None:
    """`at` as a polynomial in x, up to x³; None when it is anything else."""
    if at is None or depth > _MAX_DEPTH:
        return None
    if at == x:
        return _X
    node = index.find_onnx_producer(at, "Add", "Sub", "Mul", "Div", "Pow", "Neg")
    if node is None or node.scope != used.scope:
        return None
    terms = []
    largest = 0
    for k in range(len(node.inputs)):
        value, rank = index.read_scalar(node, k) or (None, 0)
        term = (
            read_polynomial(index, index.find_input(node, k), x, used, depth + 1)
            if value is None
            else np.array([value])
        )
        if term is None:
            return None
        terms.append(term)
        largest = max(largest, rank)
    # Of constants alone it says nothing about x, whatever else may be computed from it.
    if all(len(term) == 1 for term in terms):
        return None
    result = _combine_terms(node.op_type, terms)
    if result is None or len(result) > _MAX_DEGREE + 1:
        return None
    used.add_node(node, largest)
    return result


# The variable itself.
_X = np.array([0.0, 1.0])
_COMBINING = {"Add": polyadd, "Sub": polysub, "Mul": polymul}


def _combine_terms(op: str, terms: list[Poly]) -> Poly | None:
    if op == "Neg":
        return -terms[0]
    left, right = terms
    if op in _COMBINING:
        combined: Poly = _COMBINING[op](left, right)
        return combined
    number = float(right[0])
    # Division by x, and x in the exponent, are no polynomials.
    if len(right) > 1 or not number:
        return None
    if op == "Div":
        return left / number
    return polypow(left, int(number)) if number in (1.0, 2.0, 3.0) else None


def _is_multiple(poly: Poly) -> bool:
    """True for x times a number."""
    return len(poly) == 2 and not poly[0]


def is_close(values: Iterable[float], wanted: Iterable[float], tol: float) -> bool:
    """True when every number is the wanted one within `tol`, relative to its own size (absolute for zeros)."""
    pairs = zip_longest(values, wanted, fillvalue=0.0)
    return all(abs(value - other) <= tol * (abs(other) or 1.0) for value, other in pairs)


def list_bases(index: GraphIndex, at: TensorId, scope: str) -> list[TensorId]:
    """The tensors that `at` may be written in: itself, then back through `scope`'s scalar arithmetic, nearest first."""
    found = [at]
    for _ in range(_MAX_DEPTH):
        node = index.find_onnx_producer(found[-1], "Add", "Sub", "Mul", "Div", "Neg")
        if node is None or node.scope != scope:
            break
        operands = [
            index.find_input(node, k)
            for k in range(len(node.inputs))
            if index.read_scalar(node, k) is None
        ]
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
    factor: MaybeTensor
    poly: Poly
    used: Used


def _list_tails(index: GraphIndex, anchor: _Anchor) -> list[Tail]:
    """Every tail of an anchor, shortest first.

    Without a factor the argument is written in the anchor's own; callers choose another base if they like.
    """
    tails = [Tail(anchor.node, 1.0, 0.0, None, _X, anchor.used)]
    for _ in range(_MAX_DEPTH):
        following = _follow(index, tails[-1], anchor.inner)
        if following is None:
            break
        tails.append(following)
    return tails


def _follow(index: GraphIndex, state: Tail, inner: TensorId) -> Tail | None:
    reader = index.find_reader(state.last.result, *ARITHMETIC)
    if reader is None:
        return None
    node, k = reader
    constant = index.read_scalar(node, 1 - k)
    if constant is None:
        return (
            _follow_product(index, state, node, k, inner)
            if node.op_type == "Mul" and state.factor is None
            else None
        )
    value, rank = constant
    step = read_arithmetic(node.op_type, np.asarray(value), k)
    # Behind the product with x a constant is no shift of the anchor any more.
    if step is None or (state.factor is not None and node.op_type in ("Add", "Sub")):
        return None
    scale = state.scale * float(step[0])
    shift = state.shift * float(step[0]) + float(step[1])
    if not are_finite((scale, shift)):
        return None
    return replace(
        state, last=node, scale=scale, shift=shift, used=_add_node(state.used, node, rank)
    )


def _follow_product(
    index: GraphIndex, state: Tail, node: NodeRef, k: int, inner: TensorId
) -> Tail | None:
    """The product with x, where the other operand is x or a scalar multiple of it."""
    other = index.find_input(node, 1 - k)
    if other is None:
        return None
    for x in list_bases(index, other, node.scope):
        used = _add_node(state.used, node, 0)
        poly = read_polynomial(index, inner, x, used)
        factor = read_polynomial(index, other, x, used)
        if poly is not None and factor is not None and _is_multiple(factor):
            size = factor[1]
            return Tail(node, state.scale * size, state.shift * size, x, poly, used)
    return None


def _add_node(used: Used, node: NodeRef, rank: int) -> Used:
    # A copy: the shorter tails stay as they are.
    copy = Used(used.scope)
    copy.add_formula(used)
    copy.add_node(node, rank)
    return copy
