"""DynamicQuantizeLinear, products of integers as ONNX Runtime's kernels without VNNI compute them, hard floats."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.numerics import dequantize, quantize
from onnxq.spec import QParams, QuantSpec

# The only spec that the operator has.
DYNAMIC = QuantSpec(signed=False, symmetric=False, dynamic=True)
_INT16 = np.iinfo(np.int16)


def quantize_dynamic(x: ArrayLike) -> tuple[NDArray[np.uint8], QParams]:
    """Quantize float32 values on the scale that they give; bit-identical to ONNX Runtime, also for zeros alone."""
    values = np.asarray(x, np.float32)
    low, high = np.minimum(values.min(initial=0.0), 0), np.maximum(values.max(initial=0.0), 0)
    with np.errstate(over="ignore"):
        scale = np.float32(1) if low == high else np.float32((high - low) / np.float32(255))
        zero = np.rint(np.clip(-low / scale, 0, 255))
    qparams = QParams(np.asarray(scale), np.asarray(zero, np.int32), "this run")
    return quantize(values, qparams, DYNAMIC), qparams


def fake_quant_dynamic(x: ArrayLike) -> NDArray[np.float32]:
    """Quantize float32 values on the scale that they give, then dequantize."""
    return dequantize(*quantize_dynamic(x), DYNAMIC)


def multiply_saturating(x: ArrayLike, w: ArrayLike) -> NDArray[np.int32]:
    """Compute x @ w as the kernels without VNNI do: neighbours along K are added in 16 bits with saturation.

    x: uint8 [..., K]. w: int8 [K, N]. The reference for such kernels; without saturation it is the exact product.
    """
    left, right = np.asarray(x), np.asarray(w)
    if left.dtype != np.uint8 or right.dtype != np.int8:
        raise TypeError(f"uint8 times int8, not {left.dtype} times {right.dtype}")
    size = right.shape[0]
    total = np.zeros((*left.shape[:-1], right.shape[1]), np.int32)
    for k in range(0, size, 2):
        last = min(k + 2, size)
        products = left[..., k:last, None].astype(np.int32) * right[k:last].astype(np.int32)
        total += np.clip(products.sum(axis=-2), _INT16.min, _INT16.max)
    return total


def draw_awkward(rng: np.random.Generator, scale: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Any bit pattern of float32 (denormals, infinities, NaN), ties and levels of the scale, and their neighbours."""
    count = int(np.prod(shape))
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        steps = rng.integers(-(2 ** rng.integers(2, 18)), 2**18, count).astype(np.float32) / np.float32(2)
        levels = steps * rng.choice(np.ravel(scale), count)
        beside = np.nextafter(levels, rng.choice(np.float32([-np.inf, 0, np.inf]), count))
    return np.choose(rng.integers(0, 3, count), [any_bits, levels, beside]).astype(np.float32).reshape(shape)
