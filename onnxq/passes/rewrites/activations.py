"""Activation chains become one node: HardSwish, HardSigmoid, Gelu, and for ORT SiLU as com.microsoft.QuickGelu.

A chain between two pairs costs ORT one float kernel a node, and the DequantizeLinear in front of it is copied for each
of its readers, which also hides the chain from ORT's own fusions. Conv 3x3, 64 channels, 28x28, four layers, float ÷
int8: hard-swish chain 2.3, HardSwish 2.7; GELU by Erf 2.0, Gelu 2.4; SiLU chain 2.35, Sigmoid and Mul both quantized
2.56, QuickGelu 2.77 (Relu: 2.9). 1x1 convolutions: 0.65, 0.96; 0.48, 0.71; 0.69, 0.83, 1.06 (1.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.rewrites.algebra import Poly, Tail, Used, bases, close, polynomial, walk
from onnxq.passes.rewrites.replace import Replacement, apply_replacements
from onnxq.passes.view import SINGLE, View, tolerance
from onnxq.sites import TensorId

# Gelu's two forms, Hendrycks and Gimpel 2016 (https://arxiv.org/abs/1606.08415): x/2·(1 + erf(x/√2)), and
# x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
_ERF = {1: 1 / math.sqrt(2)}
_TANH = {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}
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


def fuse_activations(proto: ModelLike, ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Every chain that computes one of the functions above, in any spelling, replaced by its node."""
    return apply_replacements(proto, "activations", lambda view: _find(view, ctx))


def _find(view: View, ctx: RunContext) -> list[Replacement]:
    found: list[Replacement] = []
    taken: set[str] = set()
    for node in view.index.nodes:
        anchor = None if node.name in taken else _anchor(view, node)
        match = None if anchor is None else _match(view, anchor, ctx)
        if match is not None and not match.nodes & taken:
            found.append(match)
            taken |= match.nodes
    return found


def _anchor(view: View, node: NodeRef) -> _Anchor | None:
    if node.domain or not node.inputs:
        return None
    used = Used(node.scope)
    if node.op_type in ("Erf", "Tanh", "Sigmoid", "HardSigmoid"):
        inner = view.tensor(node, 0)
        used.take(view, node)
        if inner is None:
            return None
        if node.op_type != "HardSigmoid":
            return _Anchor(node.op_type, node, inner, used)
        slope, offset = float(node.attrs.get("alpha", 0.2)), float(node.attrs.get("beta", 0.5))
        return _Anchor("clamp", node, inner, used, 0.0, 1.0, slope, offset)
    return _clamp(view, node, used)


def _clamp(view: View, node: NodeRef, used: Used) -> _Anchor | None:
    """Clip, Relu, Min and Max with scalars, as many as follow each other, as one clamp."""
    if node.op_type not in _CLAMPS:
        return None
    reader = view.sole_reader(view.output(node))
    # Only the last of a row is looked at, and the others from there.
    if reader is not None and reader[0].op_type in _CLAMPS and _bounds(view, reader[0]) is not None:
        return None
    low, high, at, inner = -math.inf, math.inf, node, None
    while True:
        bounds = _bounds(view, at)
        if bounds is None:
            break
        low, high = min(max(bounds[0], low), high), min(max(bounds[1], low), high)
        used.take(view, at, bounds[3])
        inner = view.tensor(at, bounds[2])
        before = view.producer(inner, *_CLAMPS)
        if inner is None or before is None or before.scope != node.scope or view.sole_reader(inner) is None:
            break
        at = before
    if inner is None or math.isinf(low) or math.isinf(high):
        return None
    return _Anchor("clamp", node, inner, used, low, high)


def _bounds(view: View, node: NodeRef) -> tuple[float, float, int, int] | None:
    """(low, high, data input, rank of the constant) of one clamping node with constant bounds."""
    if node.op_type == "Relu":
        return 0.0, math.inf, 0, 0
    if node.op_type == "Clip":
        ends = []
        for k, name, missing in ((1, "min", -math.inf), (2, "max", math.inf)):
            given = view.scalar(node, k)
            if given is None and view.tensor(node, k) is not None:
                return None
            value = given[0] if given else float(node.attrs.get(name, missing))
            ends.append(value if abs(value) < _MOST else math.copysign(math.inf, value))
        return ends[0], ends[1], 0, 0
    if node.op_type not in ("Min", "Max") or len(node.inputs) != 2:
        return None
    k = 1 if view.scalar(node, 0) is not None else 0
    bound = view.scalar(node, 1 - k)
    if bound is None or view.scalar(node, k) is not None:
        return None
    low, high = (-math.inf, bound[0]) if node.op_type == "Min" else (bound[0], math.inf)
    return low, high, k, bound[1]


def _match(view: View, anchor: _Anchor, ctx: RunContext) -> Replacement | None:
    """The longest tail that makes a known activation."""
    # A shorter one may be known as well: the HardSigmoid inside a HardSwish.
    for tail in reversed(walk(view, anchor.node, anchor.inner, anchor.used)):
        readings = [tail] if tail.factor is not None else _without_factor(view, anchor, tail)
        for reading in readings:
            x = reading.factor
            if x is None:
                continue
            single = _recognise(anchor, reading, tail.factor is not None, view.index.dtype(x), ctx)
            last, used = reading.last, reading.used
            # Constants that broadcast x would be lost, and tensors that others read must stay.
            whole = used.rank <= view.least_rank(x) and view.private(used.tensors - {last.result}, used.nodes)
            if single is not None and whole:
                nodes = frozenset(used.nodes)
                return Replacement(last, nodes, single.op_type, (x,), single.attrs, single.domain, single.opset)
    return None


def _without_factor(view: View, anchor: _Anchor, tail: Tail) -> list[Tail]:
    """The tail written in each tensor its argument may come from, the farthest first."""
    readings = []
    for x in reversed(bases(view, anchor.inner, anchor.node.scope)):
        used = Used(anchor.node.scope)
        poly = polynomial(view, anchor.inner, x, used)
        if poly is not None:
            used.merge(tail.used)
            readings.append(Tail(tail.last, tail.scale, tail.shift, x, poly, used))
    return readings


def _recognise(anchor: _Anchor, tail: Tail, product: bool, dtype: int, ctx: RunContext) -> _Single | None:
    """The single node of scale·A(P) + shift, times x when it is a product."""
    if dtype not in SINGLE:
        return None
    tol = tolerance(ctx.computes or dtype)
    if anchor.kind == "clamp":
        return _hard(anchor, tail, product, tol)
    if not product:
        return None
    halves = close({0: tail.shift, 1: tail.scale}, {0: 0.5, 1: 0.5}, tol)
    if anchor.kind == "Erf" and halves and close(tail.poly, _ERF, tol):
        return _Single("Gelu", 20)
    if anchor.kind == "Tanh" and halves and close(tail.poly, _TANH, tol):
        return _Single("Gelu", 20, {"approximate": "tanh"})
    plain = close({0: tail.shift, 1: tail.scale}, {1: 1.0}, tol)
    if anchor.kind == "Sigmoid" and plain and set(tail.poly) <= {1} and dtype == TensorProto.FLOAT:
        # The slope as ORT's kernel holds it, in float32.
        return _Single("QuickGelu", 1, {"alpha": float(np.float32(tail.poly[1]))}, "com.microsoft")
    return None


def _hard(anchor: _Anchor, tail: Tail, product: bool, tol: float) -> _Single | None:
    poly: Poly = {p: anchor.slope * v for p, v in tail.poly.items()}
    poly[0] = poly.get(0, 0.0) + anchor.offset
    ends = {0: tail.scale * anchor.low, 1: tail.scale * anchor.high}
    if set(poly) != {0, 1} or not close(ends, {1: 1.0}, tol) or abs(tail.shift) > tol:
        return None
    alpha, beta = tail.scale * poly[1], tail.scale * poly[0]
    if product:
        return _Single("HardSwish", 14) if close({0: beta, 1: alpha}, {0: 0.5, 1: 1 / 6}, tol) else None
    # A plain clip, or there already.
    if not alpha or not beta or tail.last.op_type == "HardSigmoid":
        return None
    return _Single("HardSigmoid", 6, {"alpha": float(np.float32(alpha)), "beta": float(np.float32(beta))})
