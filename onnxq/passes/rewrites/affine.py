"""BatchNormalization and scalar or per-channel arithmetic folded into the linear operator beside them.

Behind Conv, ConvTranspose and Gemm (MatMul with its bias Add): Mul, Div, Add, Sub by a scalar or a constant per output
channel, and BatchNormalization, as long a row as there is. In front: scalars only (a factor per input channel would
carry the channels' imbalance from the weight, which has a scale per channel, into the activation, which has one).

PaddlePaddle's PP-LCNet family writes a learnable affine block, Mul and Add by one number each, behind every convolution
and every activation; left alone they cost a float kernel and hide the convolution's own output from its pair.
A BatchNormalization in front of a Conv stays: it evens out channels that share one activation scale.
"""

from __future__ import annotations

import numpy as np

from onnxq.arrays import Array, Array64
from onnxq.numerics.rounding import round_to_type
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.linear import (
    ARITHMETIC,
    Linear,
    ScalarSource,
    find_linear,
    find_scalar_source,
    list_followers,
    scale_outputs,
    sum_inputs,
)
from onnxq.passes.patterns import Edit, View
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import Refusal

_BATCHNORM = frozenset({"BatchNormalization"})


def fold_batchnorm(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Every BatchNormalization that alone reads a linear operator with constant weights."""
    return _fold_behind(state, "batchnorm", _BATCHNORM)


def fold_scalars(ctx: RunContext, state: FloatState) -> FloatStep:
    """Every scalar or per-channel Mul, Div, Add, Sub behind a linear operator, and scalar ones in front of one."""
    # A BatchNormalization behind such arithmetic comes into reach only now.
    kinds = ARITHMETIC if "batchnorm" in ctx.skip else ARITHMETIC | _BATCHNORM
    state, behind = _fold_behind(state, "scalars", kinds)
    state, front = _fold_in_front(state)
    return state, PassReport("scalars", behind.changed + front.changed, behind.skipped + front.skipped)


def _fold_behind(state: FloatState, name: str, kinds: frozenset[str]) -> FloatStep:
    view = View(state.model)
    edit, changed, skipped = Edit(state.model), [], []
    for node in view.index.nodes:
        op = find_linear(view, node)
        affine = None if op is None else list_followers(view, op, kinds)
        if op is None or affine is None or not affine.nodes:
            continue
        row = ", ".join(follower.name for follower in affine.nodes)
        weight = scale_outputs(op.weight, affine.a, op.axis, op.groups)
        if not _write_constants(view, edit, op, weight, affine.a * op.bias + affine.c):
            skipped.append(_refuse_overflow(op, row, name))
            continue
        edit.absorb_chain(op.last, affine.nodes)
        changed.append(f"{node.name}: took in {row}")
    return edit.finish_pass(state, name, changed, skipped)


def _refuse_overflow(op: Linear, row: str, name: str) -> Refusal:
    reason = f"folding {row} into it overflows {op.weight.dtype}"
    return Refusal(op.node.name, reason, "nothing to do; the nodes stay as they are", name, "R112")


def _write_constants(view: View, edit: Edit, op: Linear, weight: Array | None, bias: Array64) -> bool:
    """Give an operator another weight and bias; False, and no change, where one of them overflows its type."""
    if weight is None:
        return False
    if op.bias_at is None or (not np.any(bias) and view.tensor(*op.bias_at) is None):
        # No bias of zeros where there was none.
        edit.set_constant(view, view.edge(op.node, 1), weight)
        return True
    narrow = round_to_type(np.array(np.broadcast_to(bias, (op.channels,))), op.weight.dtype)
    if narrow is None:
        return False
    edit.set_constant(view, view.edge(op.node, 1), weight)
    holder, k = op.bias_at
    edit.set_constant(view, view.edge(holder, k), narrow)
    if holder.op_type == "Gemm" and float(holder.attrs.get("beta", 1.0)) != 1.0:
        # The bias holds it now.
        edit.set_attrs(holder, {"beta": 1.0})
    return True


def _fold_in_front(state: FloatState) -> FloatStep:
    view = View(state.model)
    edit, changed, skipped = Edit(state.model), [], []
    for node in view.index.nodes:
        op = find_linear(view, node)
        source = None if op is None else find_scalar_source(view, op)
        move = None if op is None or source is None else _move_source(op, source)
        if op is None or source is None or move is None:
            continue
        row = ", ".join(leader.name for leader in source.nodes)
        bias, rest = move
        fits = round_to_type(np.array(rest), op.weight.dtype) is not None
        weight = round_to_type(op.weight.astype(np.float64) * source.s, op.weight.dtype) if fits else None
        if not _write_constants(view, edit, op, weight, bias):
            skipped.append(_refuse_overflow(op, row, "scalars"))
            continue
        x = source.x.name
        if rest != 0.0:
            shift = edit.constant(node.scope, f"{node.name}/shift", np.array(rest, dtype=op.weight.dtype))
            x = edit.insert_before(node, "Add", (x, shift), {}, f"{x}/shifted")
        edit.read(view.edge(node, 0), x)
        changed.append(f"{node.name}: took in {row}")
    return edit.finish_pass(state, "scalars", changed, skipped)


def _move_source(op: Linear, source: ScalarSource) -> tuple[Array64, float] | None:
    """How s·x + t enters an operator: its new bias, and the term still added to x (t/s) where padding is zero."""
    if source.t == 0.0:
        return op.bias, 0.0
    if op.bias_at is not None and not _is_padded(op):
        sums = sum_inputs(op.weight, op.axis) * float(op.node.attrs.get("alpha", 1.0))
        return op.bias + source.t * sums, 0.0
    # One node for one node would gain nothing, and t/s loses digits where s is small.
    if len(source.nodes) < 2 or abs(source.s) < 1e-6:
        return None
    return op.bias, source.t / source.s


def _is_padded(op: Linear) -> bool:
    """True when the output's border sees fewer inputs than its middle."""
    if op.node.op_type in ("Gemm", "MatMul"):
        return False
    given = op.node.attrs.get("auto_pad", "NOTSET")
    padded = given not in ("NOTSET", "VALID") or (given == "NOTSET" and any(op.node.attrs.get("pads", ())))
    # Kernels of a ConvTranspose overlap less at the border even without padding.
    return op.node.op_type == "ConvTranspose" or padded
