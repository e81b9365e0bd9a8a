"""Quantization arithmetic in plain numpy. All rounding of onnxq is here.

rounding   quantize, dequantize, fake_quant, bit-identical to ONNX Runtime
ranges     [lo, hi] -> scale and zero point; the float Clip that enforces a narrow bit width
weights    ranges of constants, per tensor, channel or block
saturation weights whose products a kernel adds in 16 bits
bias       int32 biases with scale s_x * s_w that cannot overflow
packing    two 4-bit values per byte
blas       number of threads of matrix products
"""

from onnxq.numerics.bias import bias_qparams, floor_weight_scale
from onnxq.numerics.packing import pack_int4, unpack_int4
from onnxq.numerics.ranges import clip_bounds, qparams_from_range, scale_floor, symmetric_steps
from onnxq.numerics.rounding import align, dequantize, fake_quant, levels, quantize, scale_as
from onnxq.numerics.saturation import (
    SumOrder,
    fake_quant_weight,
    keep_sums,
    nearest_within_sum,
    needs_bound,
    neighbours,
    partners,
    quantize_weight,
    saturating_sums,
    widening,
)
from onnxq.numerics.weights import weight_qparams

__all__ = [
    "SumOrder",
    "align",
    "bias_qparams",
    "clip_bounds",
    "dequantize",
    "fake_quant",
    "fake_quant_weight",
    "floor_weight_scale",
    "keep_sums",
    "levels",
    "nearest_within_sum",
    "needs_bound",
    "neighbours",
    "pack_int4",
    "partners",
    "qparams_from_range",
    "quantize",
    "quantize_weight",
    "saturating_sums",
    "scale_as",
    "scale_floor",
    "symmetric_steps",
    "unpack_int4",
    "weight_qparams",
    "widening",
]
