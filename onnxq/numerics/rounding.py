"""QuantizeLinear and DequantizeLinear in numpy, bit-identical to ONNX Runtime's CPU kernels.

    q = saturate(rint(x / scale) + zero_point, qmin, qmax)      y = (q - zero_point) * scale

The division is float32 also for float16 tensors, whose scale is first rounded to float16 as in a float16 model; rint
rounds half to even; saturation happens before the zero point is added.

+-inf saturates and NaN becomes qmin, as in ONNX Runtime's vector kernel (float32, per tensor). Its scalar loops
(float16, channels on the last axis, blocks, the odd end of an int4 tensor) compute in int32 and, on x86, wrap to
the other end of the range from |x / scale| >= 2**31 on, hence also for inf and NaN; here such values saturate, as the
ONNX standard says. Before 1.30 its float16 kernel truncates x / scale towards zero (microsoft/onnxruntime#32452);
here it is rounded.
A spec narrower than its storage saturates at its own qmin and qmax; in the emitted model a float Clip with
`clip_bounds` in front of QuantizeLinear does the same.
"""

from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from onnxq.arrays import Array, Array64, Codes, Floats, Shape, as_float32, as_int32, cast_quietly
from onnxq.errors import PlanError
from onnxq.numerics.machine import map_parts
from onnxq.spec import Granularity, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

# A tensor's dims, of which an ONNX model need not know all.
DimT = TypeVar("DimT", int, int | str | None)

Aligned = tuple[Array, Codes]


def _find_type(spec: QuantSpec) -> np.dtype[Any]:
    # Sub-byte values take one byte each here; they are packed when they are written.
    return np.dtype(ml_dtypes.float8_e4m3fn if spec.is_float else spec.numpy_storage)


def choose_float(values: Array) -> type[np.floating[Any]]:
    """The type in which values are quantized and given back: float16 for float16, else float32."""
    return np.float16 if values.dtype == np.float16 else np.float32


def quantize(x: ArrayLike, qparams: QParams, spec: QuantSpec) -> Array:
    """Quantize to the storage type's numpy dtype (int4 as int8, FP8 as ml_dtypes'); the result has x's shape.

    x: float16, or anything that converts to float32. A 32-bit spec (biases) divides in float64, because float32
    cannot hold its values. Raises PlanError if the scale's shape does not fit x.
    """
    values = np.asarray(x)
    scale, zero = align_qparams(qparams, spec, values.shape, choose_float(values))
    if values.size <= _SLAB or not values.ndim:
        return _quantize(values, scale, zero, spec)
    codes = np.empty(values.shape, _find_type(spec))

    def work(part: slice) -> None:
        # Scales along another axis serve every part.
        rows = part if scale.ndim and len(scale) == len(values) else slice(None)
        own = (scale[rows], zero[rows]) if scale.ndim else (scale, zero)
        codes[part] = _quantize(values[part], *own, spec)

    map_parts(work, len(values), max(1, _SLAB * len(values) // values.size), elements=values.size)
    return codes


def _quantize(values: Array, scale: Floats, zero: Codes, spec: QuantSpec) -> Array:
    width = np.float64 if spec.bits == 32 else np.float32
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # Both sides are cast: numpy 1 would divide by a scalar float64 scale in float32.
        scaled = np.asarray(as_float32(values).astype(width, copy=False) / scale.astype(width))
        if spec.is_float:
            # The cast makes NaN of what lies beyond 448, where ONNX saturates.
            np.clip(scaled, np.float32(spec.qmin), np.float32(spec.qmax), out=scaled)
            return scaled.astype(_find_type(spec))
        np.rint(scaled, out=scaled)
        # fmax and fmin ignore NaN on one side, so NaN becomes qmin.
        np.fmax(scaled, (spec.qmin - zero).astype(width), out=scaled)
        np.fmin(scaled, (spec.qmax - zero).astype(width), out=scaled)
        levels = as_int32(scaled)
    levels += zero
    return levels.astype(_find_type(spec))


def dequantize(
    q: ArrayLike, qparams: QParams, spec: QuantSpec, dtype: DTypeLike = np.float32
) -> Array:
    """Dequantize to `dtype`, float32 or float16: multiplied in float32, then rounded to float16 if requested.

    Raises PlanError if the scale's shape does not fit q.
    """
    levels = np.asarray(q)
    scale, zero = align_qparams(qparams, spec, levels.shape, dtype)
    with np.errstate(over="ignore", under="ignore"):
        # The difference of two bytes leaves 8 bits.
        steps = as_float32(levels) if spec.is_float else as_float32(as_int32(levels) - zero)
        return np.asarray(steps * scale).astype(dtype, copy=False)


def fake_quant(x: ArrayLike, qparams: QParams, spec: QuantSpec) -> Array:
    """Quantize, then dequantize. Returns float16 for float16, else float32."""
    values = np.asarray(x)
    # The common case, without the detour over integers; the bits of the result are the same.
    if values.dtype == np.float32 and spec.bits <= 16 and not spec.is_float:
        return _fake_quant_float(values, qparams, spec)
    return dequantize(quantize(values, qparams, spec), qparams, spec, choose_float(values))


# Values per step: 1 MiB of float32, of which there are a few copies.
_SLAB = 1 << 18
# Values per step: 256 KiB of float32 for input and output, which stay in the second-level cache.
_CHUNK = 1 << 15


def _fake_quant_float(values: Floats, qparams: QParams, spec: QuantSpec) -> Floats:
    """Compute fake_quant in float32, which holds 16-bit integers exactly."""
    scale, zero = align_qparams(qparams, spec, values.shape, np.float32)
    low, high = (as_float32(level - zero) for level in (spec.qmin, spec.qmax))
    if scale.ndim:
        return _round_float(values, scale, low, high, np.empty(values.shape, np.float32))
    flat = np.ascontiguousarray(values).ravel()
    done = np.empty(flat.size, np.float32)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        _round_float(flat[part], scale, low, high, done[part])
    return done.reshape(values.shape)


def _round_float(
    values: Floats,
    scale: Floats,
    low: Floats,
    high: Floats,
    out: Floats,
) -> Floats:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.divide(values, scale, out=out)
        np.rint(out, out=out)
        np.fmax(out, low, out=out)
        np.fmin(out, high, out=out)
        # Turns -0.0 into 0.0, as the integer path does.
        out += np.float32(0)
        out *= scale
    return out


def list_quantized_values(spec: QuantSpec) -> Array64:
    """List the quantized values of a spec in ascending order: integers, or the 253 uneven values of FP8."""
    if not spec.is_float:
        return np.arange(spec.qmin, spec.qmax + 1, dtype=np.float64)
    every = np.arange(256, dtype=np.uint8).view(_find_type(spec)).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


def cast_scale(qparams: QParams, dtype: DTypeLike, *, signed: bool = False) -> Array:
    """Cast the scale as a model of float type `dtype` stores it. signed: it may be negative, as those of blocks.

    Raises PlanError if it is not positive, or if float16 makes it 0 or inf.
    """
    scale = cast_quietly(np.asarray(qparams.scale), dtype)
    fits = np.isfinite(scale) & ((scale != 0) if signed else (scale > 0))
    if not fits.all():
        raise PlanError(
            f"scale {np.ravel(qparams.scale)[np.ravel(~fits)][0]:g}",
            f"is 0, negative or not finite as {np.dtype(dtype).name}",
            "keep this tensor float, or quantize a float32 export",
            code="Q407",
        )
    return scale


def align_qparams(qparams: QParams, spec: QuantSpec, shape: Shape, dtype: DTypeLike) -> Aligned:
    """Shape scale (float32, rounded through `dtype`) and zero point to broadcast over a tensor of `shape`.

    Raises PlanError if the granularity does not fit the shape.
    """
    # Blocks are channels, too, where each is a row by itself.
    signed = not spec.has_one_scale
    scale = as_float32(cast_scale(qparams, dtype, signed=signed))
    zero = as_int32(qparams.zero_point)
    return _shape_to_broadcast(scale, spec, shape), _shape_to_broadcast(zero, spec, shape)


def _shape_to_broadcast(array: Array, spec: QuantSpec, shape: Shape) -> Array:
    grain = spec.granularity
    if not isinstance(grain, (PerChannel, PerBlock)):
        if array.size != 1:
            raise PlanError(
                "scale",
                f"{array.size} values for a tensor quantized as a whole",
                "give one value",
                code="Q407",
            )
        return array.reshape(())
    rank = len(shape)
    if not -rank <= grain.axis < rank:
        raise PlanError(
            f"axis {grain.axis}",
            f"is outside a tensor of shape {shape}",
            "use an axis the tensor has",
            code="Q407",
        )
    axis = grain.axis % rank
    if isinstance(grain, PerChannel):
        if array.size != shape[axis]:
            raise PlanError(
                "scale",
                f"{array.size} values for {shape[axis]} channels on axis {axis}",
                "calibrate again",
                code="Q407",
            )
        return array.reshape([-1 if k == axis else 1 for k in range(rank)])
    wanted = compute_block_shape(shape, axis, grain.size)
    if array.shape != wanted:
        raise PlanError(
            "scale",
            f"shape {array.shape} where blocks of {grain.size} need {wanted}",
            "calibrate again",
            code="Q407",
        )
    # The last block may be shorter.
    return np.repeat(array, grain.size, axis=axis).take(np.arange(shape[axis]), axis=axis)


def shape_scales(shape: tuple[DimT, ...], grain: Granularity) -> tuple[DimT, ...]:
    """Compute the shape of scale and zero point of a tensor of this shape; unknown dims stay."""
    if isinstance(grain, PerTensor):
        return ()
    axis = grain.axis % len(shape)
    if isinstance(grain, PerChannel):
        return (shape[axis],)
    return compute_block_shape(shape, axis, grain.size)


def compute_block_shape(shape: tuple[DimT, ...], axis: int, size: int) -> tuple[DimT, ...]:
    """Compute the shape of scale and zero point of a tensor in blocks of `size` along `axis`; unknown dims stay."""
    # The last block may be shorter than the others.
    return tuple(
        -(-dim // size) if k == axis and isinstance(dim, int) else dim
        for k, dim in enumerate(shape)
    )


def round_to_type(value: Array64, dtype: np.dtype[Any]) -> Array | None:
    """`value` in a float type; None if it overflows, or is so small there that it loses significant digits."""
    # float16 is subnormal below 6e-5: a weight times 1/255 may end there.
    narrow = cast_quietly(value, dtype)
    wide = narrow.astype(np.float64)
    largest = float(abs(value).max(initial=0.0))
    # A unit in the last place of the largest value.
    limit = float(ml_dtypes.finfo(dtype).eps) * largest  # type: ignore[no-untyped-call]
    return narrow if (abs(wide - value) <= limit).all() else None
