"""From a float range to scale and zero point, and from these to the float Clip of a narrow bit width."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from onnxq.errors import CalibrationError
from onnxq.numerics.rounding import quantize, scale_as
from onnxq.spec import PerTensor, QParams, QuantSpec

# A scale below this carries nothing but trouble: 0 and denormals make NaN, are flushed by some engines or refused
# (TensorRT), and s_x * s_w must stay a normal float32. 2**-24 is also the smallest scale a float16 model can hold.
# 16-bit steps are 256 times finer, int32 biases live on products of two scales.
_FLOOR = {4: 2.0**-24, 8: 2.0**-24, 16: 2.0**-32, 32: 2.0**-56}

_LARGEST = float(np.finfo(np.float32).max)

Bound = tuple[float | None, float | None]


def scale_floor(spec: QuantSpec) -> float:
    """Smallest scale `qparams_from_range` gives: what a dead channel or an all-zero tensor gets."""
    return _FLOOR[spec.storage_bits]


def symmetric_steps(spec: QuantSpec) -> int:
    """Steps between 0 and the top of a symmetric range: 127 for int8, and for uint8, whose zero point is 128.

    For FP8 the largest value it holds, 448.
    """
    return spec.qmax - (0 if spec.signed else 1 << (spec.bits - 1))


def qparams_from_range(
    lo: ArrayLike, hi: ArrayLike, spec: QuantSpec, *, origin: str = "", bound: Bound = (None, None)
) -> QParams:
    """Scale and zero point whose levels cover [lo, hi], widened to contain 0, which is always a level.

    lo, hi: scalars per tensor, or arrays of the shape the spec's granularity asks for; the result has that shape.
    symmetric: scale = max(|lo|, |hi|) / (qmax - zero_point), so +max is a level (/127 for int8, signed or not).
    asymmetric: scale = (hi - lo) / (qmax - qmin), zero point to the nearest level.
    bound: [low, high] that a Relu or Clip in front guarantees. The range is cut to it and the scale lowered until
        every level lies inside in float32 arithmetic. ONNX Runtime then drops that node, as it does wherever the
        node's ends quantize to qmin and qmax. That alone is less than this asks for, but up to 1.30 it fails to load
        a model where it holds and a level lies outside, so do not relax it. A side the scheme
        cannot keep (symmetric levels below a Relu's 0; a bound so near 0 that it asks for less than the floor)
        is left as it is.

    The scale is a normal, finite float32 of at least `scale_floor(spec)`, and every level is finite.
    Raises CalibrationError on NaN, inf or lo > hi.
    """
    low, high = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
    _check(low, high, origin)
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    if bound[0] is not None:
        low = np.maximum(low, min(bound[0], 0.0))
    if bound[1] is not None:
        high = np.minimum(high, max(bound[1], 0.0))
    floor = scale_floor(spec)
    if spec.symmetric:
        zero = np.full(low.shape, float(spec.qmax - symmetric_steps(spec)))
        scale = _stored(np.maximum(-low, high) / symmetric_steps(spec), floor)
    else:
        scale = _stored((high - low) / (spec.qmax - spec.qmin), floor)
        zero = np.clip(spec.qmin - np.rint(low / scale), spec.qmin, spec.qmax)
    for level, limit in ((spec.qmin - zero, bound[0]), (spec.qmax - zero, bound[1])):
        scale = _inside(scale, level, np.copysign(_LARGEST, level), floor)
        if limit is not None:
            scale = _inside(scale, level, np.full(level.shape, np.float32(limit), np.float64), floor)
    return QParams(scale, np.asarray(zero, np.int32), origin, spec.levels)


def clip_bounds(qparams: QParams, spec: QuantSpec, dtype: DTypeLike = np.float32) -> tuple[Any, Any]:
    """Bounds, as scalars of `dtype`, of the float Clip that makes a wider container saturate at qmin and qmax.

    Clip(x, lo, hi) -> QuantizeLinear -> DequantizeLinear in the storage type equals fake_quant for every x but NaN:
    (qmin - zp) * s and (qmax - zp) * s round back to exactly qmin and qmax.
    Raises CalibrationError if the scale is per channel or block (Clip takes two scalars), or if the levels leave
    `dtype`'s range.
    """
    if not isinstance(spec.granularity, PerTensor):
        raise CalibrationError(
            "clip bounds", "Clip has one pair of bounds, the scale has many", "quantize per tensor", code="Q504"
        )
    scale = scale_as(qparams, dtype).astype(np.float32).reshape(())
    zero = np.asarray(qparams.zero_point, np.int32).reshape(())
    with np.errstate(over="ignore"):
        ends = [((level - zero).astype(np.float32) * scale).astype(dtype)[()] for level in (spec.qmin, spec.qmax)]
    reached = quantize(np.asarray(ends), qparams, spec)
    if not np.isfinite(ends).all() or reached.tolist() != [spec.qmin, spec.qmax]:
        raise CalibrationError(
            f"scale {float(scale):g}", f"its levels end at {ends[0]:g} and {ends[1]:g} in {np.dtype(dtype).name}",
            "keep this tensor float", code="Q504")  # fmt: skip
    return ends[0], ends[1]


def _check(low: NDArray[np.float64], high: NDArray[np.float64], origin: str) -> None:
    subject = origin or "range"
    wrong = ~(np.isfinite(low) & np.isfinite(high))
    if wrong.any():
        raise CalibrationError(
            subject,
            f"[{low[wrong][0]:g}, {high[wrong][0]:g}] is not finite",
            "find where the float model makes NaN or inf",
            code="Q501",
        )
    if (low > high).any():
        raise CalibrationError(
            subject,
            f"[{low[low > high][0]:g}, {high[low > high][0]:g}] is empty",
            "give the low end first",
            code="Q504",
        )


def _stored(scale: NDArray[Any], floor: float) -> NDArray[np.float32]:
    return np.asarray(np.clip(scale, floor, _LARGEST), np.float32)


def _inside(
    scale: NDArray[np.float32], level: NDArray[np.float64], limit: NDArray[np.float64], floor: float
) -> NDArray[np.float32]:
    """Largest float32 scale, at most `scale`, with level * scale not beyond `limit`; as it was where none can be."""
    count = np.where(level == 0, 1.0, level)
    target = limit / count
    possible = (level != 0) & (target >= floor)
    lowered = np.where(possible, np.minimum(scale, np.where(possible, target, 1.0)), scale).astype(np.float32)
    steps = count.astype(np.float32)
    size = np.abs(limit)
    with np.errstate(over="ignore"):
        while (beyond := possible & (np.abs(lowered * steps) > size)).any():
            lowered = np.where(beyond, np.nextafter(lowered, np.float32(0)), lowered)
    return np.asarray(lowered, np.float32)
