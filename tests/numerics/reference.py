"""Products of integers as ONNX Runtime's kernels on CPUs without VNNI compute them, and floats hard to round."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_INT16 = np.iinfo(np.int16)


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
