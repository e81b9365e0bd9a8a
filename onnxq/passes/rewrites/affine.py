"""BatchNormalization and scalar or per-channel arithmetic folded into the linear operator beside them.

Behind Conv, ConvTranspose and Gemm (MatMul with its bias Add): Mul, Div, Add, Sub by a scalar or a constant per output
channel, and BatchNormalization, as long a row as there is. In front: scalars only (a factor per input channel would
carry the channels' imbalance from the weight, which has a scale per channel, into the activation, which has one).

PaddlePaddle's PP-LCNet family writes a learnable affine block, Mul and Add by one number each, behind every convolution
and every activation; left alone they cost a float kernel and hide the convolution's own output from its pair.
A BatchNormalization in front of a Conv stays: it evens out channels that share one activation scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.graph import ModelLike
from onnxq.passes.affine_core import Array64, round_to_type, scale_outputs, sum_inputs
from onnxq.passes.base import RunContext
from onnxq.passes.edit import Edit
from onnxq.passes.journal import PassReport
from onnxq.passes.linear import ARITHMETIC, Affine, Linear, Source, find_linear, list_followers, scalar_source
from onnxq.passes.view import View
from onnxq.sites import Refusal

_BATCHNORM = frozenset({"BatchNormalization"})


def fold_batchnorm(proto: ModelLike, _ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Every BatchNormalization that alone reads a linear operator with constant weights."""
    return _behind(proto, "batchnorm", _BATCHNORM)


def fold_scalars(proto: ModelLike, ctx: RunContext) -> tuple[ModelLike, PassReport]:
    """Every scalar or per-channel Mul, Div, Add, Sub behind a linear operator, and scalar ones in front of one."""
    # A BatchNormalization behind such arithmetic comes into reach only now.
    kinds = ARITHMETIC if "batchnorm" in ctx.skip else ARITHMETIC | _BATCHNORM
    proto, behind = _behind(proto, "scalars", kinds)
    proto, front = _in_front(proto)
    return proto, PassReport("scalars", behind.changed + front.changed, behind.skipped + front.skipped)


def _behind(proto: ModelLike, name: str, kinds: frozenset[str]) -> tuple[ModelLike, PassReport]:
    view = View(proto)
    edit, changed, skipped = Edit(proto), [], []
    for node in view.index.nodes:
        op = find_linear(view, node)
        affine = None if op is None else list_followers(view, op, kinds)
        if op is None or affine is None or not affine.nodes:
            continue
        row = ", ".join(follower.name for follower in affine.nodes)
        values = _scale_source(op, affine)
        if values is None:
            skipped.append(Refusal(node.name, f"folding {row} into it overflows {op.weight.dtype}", _FIX, name, "R112"))
            continue
        _write(view, edit, op, *values)
        edit.absorb(op.last, affine.nodes)
        changed.append(f"{node.name}: took in {row}")
    return (edit.export() if changed else proto), PassReport(name, tuple(changed), tuple(skipped))


_FIX = "nothing to do; the nodes stay as they are"
_Values = tuple[NDArray[Any], "NDArray[Any] | None"]


def _scale_source(op: Linear, affine: Affine) -> _Values | None:
    """(weight, bias or None where there is none to write) of a·y + c."""
    weight = scale_outputs(op.weight, affine.a, op.axis, op.groups)
    return _finish_fold(op, weight, affine.a * op.bias + affine.c)


def _finish_fold(op: Linear, weight: NDArray[Any] | None, bias: Array64) -> _Values | None:
    if weight is None:
        return None
    if op.bias_at is None or (not np.any(bias) and not _has_bias(op)):
        return weight, None
    narrow = round_to_type(np.array(np.broadcast_to(bias, (op.channels,))), op.weight.dtype)
    return None if narrow is None else (weight, narrow)


def _has_bias(op: Linear) -> bool:
    return (
        op.bias_at is not None
        and op.bias_at[1] < len(op.bias_at[0].inputs)
        and bool(op.bias_at[0].inputs[op.bias_at[1]])
    )


def _write(view: View, edit: Edit, op: Linear, weight: NDArray[Any], bias: NDArray[Any] | None) -> None:
    edit.set_constant(view, view.edge(op.node, 1), weight)
    if bias is None or op.bias_at is None:
        return
    holder, k = op.bias_at
    edit.set_constant(view, view.edge(holder, k), bias)
    if holder.op_type == "Gemm" and float(holder.attrs.get("beta", 1.0)) != 1.0:
        edit.attrs(holder, {"beta": 1.0})  # the bias now holds it


def _in_front(proto: ModelLike) -> tuple[ModelLike, PassReport]:
    view = View(proto)
    edit, changed, skipped = Edit(proto), [], []
    for node in view.index.nodes:
        op = find_linear(view, node)
        source = None if op is None else scalar_source(view, op)
        move = None if op is None or source is None else _move(op, source)
        if op is None or source is None or move is None:
            continue
        row = ", ".join(leader.name for leader in source.nodes)
        values = _finish_fold(op, round_to_type(op.weight.astype(np.float64) * source.s, op.weight.dtype), move.bias)
        if values is None or round_to_type(np.array(move.rest), op.weight.dtype) is None:
            skipped.append(
                Refusal(node.name, f"folding {row} into it overflows {op.weight.dtype}", _FIX, "scalars", "R112")
            )
            continue
        _write(view, edit, op, *values)
        edit.read(view.edge(node, 0), _data(edit, op, source, move))
        changed.append(f"{node.name}: took in {row}")
    return (edit.export() if changed else proto), PassReport("scalars", tuple(changed), tuple(skipped))


@dataclass(frozen=True, eq=False)
class _Move:
    """How s·x + t enters an operator: its new bias, and the term still added to x (t/s) where padding is zero."""

    bias: Array64
    rest: float


def _move(op: Linear, source: Source) -> _Move | None:
    if source.t == 0.0:
        return _Move(op.bias, 0.0)
    if op.bias_at is not None and not _is_padded(op):
        sums = sum_inputs(op.weight, op.axis) * float(op.node.attrs.get("alpha", 1.0))
        return _Move(op.bias + source.t * sums, 0.0)
    if len(source.nodes) < 2 or abs(source.s) < 1e-6:  # nothing would be gained
        return None
    return _Move(op.bias, source.t / source.s)


def _is_padded(op: Linear) -> bool:
    """True when the output's border sees fewer inputs than its middle."""
    if op.node.op_type in ("Gemm", "MatMul"):
        return False
    given = op.node.attrs.get("auto_pad", "NOTSET")
    return (
        op.node.op_type == "ConvTranspose"
        or given not in ("NOTSET", "VALID")
        or (given == "NOTSET" and any(op.node.attrs.get("pads", ())))
    )


def _data(edit: Edit, op: Linear, source: Source, move: _Move) -> str:
    if move.rest == 0.0:
        return source.x.name
    rest = edit.constant(op.node.scope, f"{op.node.name}/shift", np.array(move.rest, dtype=op.weight.dtype))
    return edit.insert_before(op.node, "Add", (source.x.name, rest), {}, f"{source.x.name}/shifted")
