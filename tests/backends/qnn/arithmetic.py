"""The integer arithmetic of Qualcomm's NPU: the codes that its products make of their exact sums.

Qualcomm publishes none of this. It was found by experiment in the emulator of onnxruntime-qnn 2.7, see docs/engines.md,
and test_arithmetic.py compares it with the emulator bit for bit. 8-bit results are exact. A
multiplier of a 16-bit result may differ by its last bit, since the compiler computes it in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from onnxq.arrays import Array
from onnxq.spec import QuantSpec

# Bits of a sum below one code of the result, and of the multiplier, by the bits of data and result.
_FRACTION = {8: 4, 16: 8}
_MULTIPLIER = {8: 12, 16: 22}


def requantize_product(
    sums: ArrayLike, offsets: ArrayLike, multiplier: ArrayLike, zero_point: int, spec: QuantSpec
) -> Array:
    """Compute the result of Conv, ConvTranspose, Gemm or MatMul by a weight of int8 or int4, without a bias.

    sums: of data times weight, both as stored. offsets: zero point of the data times the sum of the weights.
    multiplier: scale of the data times scale of the weight, divided by the scale of the result; it broadcasts to the
    sums. zero_point, spec: of the result; the data has the same type.
    """
    exact, start = np.asarray(sums, np.float64), np.asarray(offsets, np.float64)
    factor = np.asarray(multiplier, np.float64)
    if spec.bits == 16:
        # 16-bit data is multiplied byte by byte, and the lowest byte of the sum is dropped.
        exact, start, factor = np.floor(exact / 256), np.floor(start / 256 + 0.5), factor * 256
    mantissa, exponent = np.frexp(factor)
    steps = np.rint(np.ldexp(mantissa, _MULTIPLIER[spec.bits]))
    # The sum is cut to a grid, of which the multiplier sees the middle of each cell.
    cells = np.floor(np.ldexp(exact - start, exponent - 1 + _FRACTION[spec.bits])) + 0.5
    codes = np.floor(np.ldexp(cells * steps, 1 - _FRACTION[spec.bits] - _MULTIPLIER[spec.bits]) + 0.5)
    clipped: Array = np.clip(codes + zero_point, spec.qmin, spec.qmax).astype(spec.numpy_storage)
    return clipped
