"""ONNX's DynamicQuantizeLinear in numpy, bit-identical to ONNX Runtime's: uint8 on a scale that the values give.

    scale = (max(x, 0) - min(x, 0)) / 255      zero_point = saturate(rint(-min(x, 0) / scale), 0, 255)

in float32, rint to even. Values of 0 alone get scale 1, as in ONNX Runtime; the standard leaves them open.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.numerics.rounding import dequantize, quantize
from onnxq.spec import QParams, QuantSpec

# The only spec that the operator has.
DYNAMIC = QuantSpec(signed=False, symmetric=False, dynamic=True)


def choose_dynamic_qparams(x: ArrayLike) -> QParams:
    """Scale and zero point that a run with these values, float32 and finite, computes."""
    values = np.asarray(x, np.float32)
    low = np.minimum(values.min(initial=0.0), np.float32(0))
    high = np.maximum(values.max(initial=0.0), np.float32(0))
    with np.errstate(over="ignore"):
        scale = np.float32(1) if low == high else np.float32((high - low) / np.float32(DYNAMIC.qmax))
        zero = np.rint(np.clip(-low / scale, DYNAMIC.qmin, DYNAMIC.qmax))
    return QParams(np.asarray(scale, np.float32), np.asarray(zero, np.int32), "this run")


def quantize_dynamic(x: ArrayLike) -> tuple[NDArray[np.uint8], QParams]:
    """Quantize float32 values on the scale that they give. Returns the integers, and the scale and zero point."""
    qparams = choose_dynamic_qparams(x)
    return quantize(np.asarray(x, np.float32), qparams, DYNAMIC), qparams


def fake_quant_dynamic(x: ArrayLike) -> NDArray[Any]:
    """Quantize float32 values on the scale that they give, then dequantize."""
    return dequantize(*quantize_dynamic(x), DYNAMIC)
