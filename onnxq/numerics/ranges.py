"""Scale and zero point of a float range, the float Clip that enforces a narrow bit width, and int32 biases.

The scale of a bias is that of the accumulator: activation scale times weight scale.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from onnxq.arrays import Array, Array64, Floats, are_finite, as_float32, as_float64, as_int32
from onnxq.errors import CalibrationError, PlanError
from onnxq.numerics.rounding import cast_scale, quantize
from onnxq.spec import QParams, QuantSpec

# Least scale by storage bits. 0 and denormals give NaN, are flushed by some engines or refused (TensorRT), and
# s_x * s_w must stay a normal float32. 2**-24 is also the smallest scale a float16 model can hold.
# 16-bit steps are 256 times finer; int32 biases have the product of two scales.
_FLOOR = {2: 2.0**-24, 4: 2.0**-24, 8: 2.0**-24, 16: 2.0**-32, 32: 2.0**-56}

_LARGEST = float(np.finfo(np.float32).max)
# What lies below 0 where a spec has footroom, of what lies above. It costs half a bit, and of the values in front of a
# Relu some in a hundred lie beyond.
_FOOTROOM = 0.5

# (low, high); None: no bound on that side.
Bound = tuple[float | None, float | None]


def scale_floor(spec: QuantSpec) -> float:
    """Return the smallest scale of `qparams_from_range`, which dead channels and all-zero tensors get."""
    return _FLOOR[spec.storage_bits]


def symmetric_steps(spec: QuantSpec) -> int:
    """Return the steps between 0 and the top of a symmetric range: 127 for int8, and for uint8 with zero point 128.

    For FP8: its largest value, 448.
    """
    return spec.qmax - (0 if spec.signed else 1 << (spec.bits - 1))


def qparams_from_range(
    lo: ArrayLike, hi: ArrayLike, spec: QuantSpec, *, origin: str = "", bound: Bound = (None, None)
) -> QParams:
    """Choose scale and zero point so that the quantized values cover [lo, hi] and represent 0 exactly.

    lo, hi: scalars per tensor, or arrays of the shape of the spec's granularity; the result has that shape.
    symmetric: scale = max(|lo|, |hi|) / (qmax - zero_point), so +max is represented (/127 for int8, signed or not).
    asymmetric: scale = (hi - lo) / (qmax - qmin), zero point rounded to the nearest integer. With footroom, lo is at
        most -hi / 2.
    A range narrower than the spec's min_range is widened upwards, for either scheme.
    bound: [low, high] guaranteed by a Relu or Clip in front. The range is cut to it, and the scale is lowered until
        every dequantized value lies inside in float32 arithmetic. ONNX Runtime then drops that node, as it does
        whenever the node's ends quantize to qmin and qmax. That condition is weaker, but up to 1.30 a model fails to
        load if it holds and a dequantized value lies outside, so do not relax this one. A side that the scheme cannot
        satisfy (symmetric values below a Relu's 0; a bound so near 0 that the scale would fall below the floor) is
        left as it is.

    The scale is a normal, finite float32 of at least `scale_floor(spec)`, and every dequantized value is finite.
    Raises CalibrationError on NaN, inf or lo > hi.
    """
    low, high = np.broadcast_arrays(as_float64(lo), as_float64(hi))
    _check_ends(low, high, origin)
    # Zero padding, dead channels and the end of a Relu must stay exactly 0.
    low = np.minimum(low, 0.0)
    high = np.maximum(high, 0.0)
    high = np.maximum(high, low + spec.min_range)
    if bound[0] is not None:
        low = np.maximum(low, min(bound[0], 0.0))
    if bound[1] is not None:
        high = np.minimum(high, max(bound[1], 0.0))
    if spec.footroom:
        low = np.minimum(low, -_FOOTROOM * high)
    floor = scale_floor(spec)
    if spec.symmetric:
        zero = np.full(low.shape, float(spec.qmax - symmetric_steps(spec)))
        scale = _limit_scale(np.maximum(-low, high) / symmetric_steps(spec), floor)
    else:
        scale = _limit_scale((high - low) / (spec.qmax - spec.qmin), floor)
        zero = np.clip(spec.qmin - np.rint(low / scale), spec.qmin, spec.qmax)
    # In float32: rounding up the scale can carry an end beyond the bound, or beyond the largest float.
    for level, limit in ((spec.qmin - zero, bound[0]), (spec.qmax - zero, bound[1])):
        scale = _lower_scale(scale, level, np.copysign(_LARGEST, level), floor)
        if limit is not None:
            scale = _lower_scale(scale, level, as_float64(np.float32(limit)), floor)
    return QParams(scale, as_int32(zero), origin, spec.levels)


def clip_bounds(
    qparams: QParams, spec: QuantSpec, dtype: DTypeLike = np.float32
) -> tuple[Any, Any]:
    """Compute the bounds, as scalars of `dtype`, of the float Clip that makes wider storage saturate at qmin and qmax.

    Clip(x, lo, hi) -> QuantizeLinear -> DequantizeLinear in the storage type equals fake_quant for every x but NaN:
    (qmin - zp) * s and (qmax - zp) * s round back to exactly qmin and qmax.
    Raises CalibrationError if the scale is per channel or block (Clip takes two scalars), or if the levels leave
    `dtype`'s range.
    """
    if not spec.has_one_scale:
        raise CalibrationError(
            "clip bounds",
            "Clip has one pair of bounds, the scale has many",
            "quantize per tensor",
            code="Q504",
        )
    scale = as_float32(cast_scale(qparams, dtype)).reshape(())
    zero = as_int32(qparams.zero_point).reshape(())
    with np.errstate(over="ignore"):
        ends = [
            (as_float32(level - zero) * scale).astype(dtype)[()] for level in (spec.qmin, spec.qmax)
        ]
    # Rounded to float16 a bound may be nearer to another level.
    reached = quantize(np.asarray(ends), qparams, spec)
    if not are_finite(ends) or reached.tolist() != [spec.qmin, spec.qmax]:
        raise CalibrationError(
            f"scale {float(scale):g}",
            f"its levels end at {ends[0]:g} and {ends[1]:g} in {np.dtype(dtype).name}",
            "keep this tensor float",
            code="Q504",
        )
    return ends[0], ends[1]


def _check_ends(low: Array64, high: Array64, origin: str) -> None:
    endless = ~(np.isfinite(low) & np.isfinite(high))
    for wrong, cause, fix, code in (
        (endless, "is not finite", "find where the float model makes NaN or inf", "Q501"),
        (low > high, "is empty", "give the low end first", "Q504"),
    ):
        if wrong.any():
            cause = f"[{low[wrong][0]:g}, {high[wrong][0]:g}] {cause}"
            raise CalibrationError(origin or "range", cause, fix, code=code)


def _limit_scale(scale: Array, floor: float) -> Floats:
    return as_float32(np.clip(scale, floor, _LARGEST))


def _lower_scale(scale: Floats, level: Array64, limit: Array64, floor: float) -> Floats:
    """Find the largest float32 scale, at most `scale`, with level * scale within `limit`; unchanged without any."""
    count = np.where(level == 0, 1.0, level)
    target = limit / count
    possible = (level != 0) & (target >= floor)
    lowered = as_float32(
        np.where(possible, np.minimum(scale, np.where(possible, target, 1.0)), scale)
    )
    steps = as_float32(count)
    size = abs(limit)
    with np.errstate(over="ignore"):
        # The division is off by at most one rounding, so this ends after a step or two.
        while (beyond := possible & (abs(lowered * steps) > size)).any():
            lowered = np.where(beyond, np.nextafter(lowered, np.float32(0)), lowered)
    return as_float32(lowered)


# |bias| stays below 2**29 steps, a quarter of int32; the rest is for the accumulated products.
_BIAS_STEPS = 2.0**29


def bias_qparams(x: QParams, w: QParams, count: int) -> QParams:
    """Make the qparams of a bias: scale s_x * s_w, multiplied in float32 as the engine does, zero point 0.

    x: per tensor. w: per tensor -> scale []; per output channel -> scale [count].
    count: number of bias values. If a weight channel serves several groups (ConvTranspose), the channel scales repeat
        group by group.
    Raises PlanError if x is not per tensor or the weight's channels do not divide `count`.
    """
    if np.size(x.scale) != 1:
        raise PlanError(
            "bias", "its input is not quantized per tensor", "use a float bias", code="Q407"
        )
    scale = as_float32(x.scale).reshape(()) * as_float32(w.scale)
    if np.ndim(w.scale):
        if np.ndim(w.scale) != 1 or count % max(np.size(w.scale), 1):
            raise PlanError(
                "bias",
                f"{count} values do not fit weight scales of shape {np.shape(w.scale)}",
                "use a float bias",
                code="Q407",
            )
        # The bias lists the channels of the first group, then those of the second …
        scale = np.tile(scale, count // np.size(w.scale))
    scale = as_float32(scale)
    return QParams(scale, np.zeros(scale.shape, np.int32), "activation scale * weight scale")


def floor_weight_scale(w_scale: ArrayLike, x_scale: ArrayLike, bias: ArrayLike) -> Floats:
    """Raise weight scales so that no bias with scale s_x * s_w overflows: w_s >= max(2**-24, |b| / (x_s * 2**29)).

    Dead channels (weights all 0, bias not) need this.
    w_scale: [] or [channels]; x_scale: []; bias: [count], with count a multiple of the channels (groups).
    Returns float32 of w_scale's shape. Raises PlanError if the shapes do not fit.
    """
    scale = as_float32(w_scale)
    size = abs(as_float64(bias)).ravel()
    if np.size(x_scale) != 1 or scale.ndim > 1 or size.size % max(scale.size, 1):
        raise PlanError(
            "bias",
            f"{size.size} values do not fit weight scales of shape {scale.shape}",
            "use a float bias",
            code="Q407",
        )
    largest = size.reshape(-1, scale.size).max(axis=0, initial=0.0).reshape(scale.shape)
    needed = np.maximum(largest / (as_float64(x_scale).reshape(()) * _BIAS_STEPS), _FLOOR[8])
    return as_float32(np.maximum(scale, needed))
