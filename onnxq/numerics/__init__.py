"""Quantization arithmetic in plain numpy; the only place in onnxq that rounds.

rounding   quantize, dequantize, fake_quant, bit for bit as ONNX Runtime computes them
ranges     [lo, hi] -> scale and zero point; the float Clip that enforces a narrow bit width
weights    ranges of constants, per tensor, channel or block
bias       int32 biases on s_x * s_w that cannot overflow
packing    two 4-bit values to a byte
"""

from onnxq.numerics.bias import bias_qparams, floor_weight_scale
from onnxq.numerics.packing import pack_int4, unpack_int4
from onnxq.numerics.ranges import clip_bounds, qparams_from_range, scale_floor, symmetric_steps
from onnxq.numerics.rounding import dequantize, fake_quant, levels, quantize, scale_as
from onnxq.numerics.weights import weight_qparams

__all__ = [
    "bias_qparams",
    "clip_bounds",
    "dequantize",
    "fake_quant",
    "floor_weight_scale",
    "levels",
    "pack_int4",
    "qparams_from_range",
    "quantize",
    "scale_as",
    "scale_floor",
    "symmetric_steps",
    "unpack_int4",
    "weight_qparams",
]
