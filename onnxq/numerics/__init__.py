"""Quantization arithmetic in plain numpy. All rounding of onnxq is here.

rounding   quantize, dequantize, fake_quant, bit-identical to ONNX Runtime
dynamic    scale and zero point computed at each run
ranges     [lo, hi] -> scale and zero point; the float Clip that enforces a narrow bit width
weights    ranges of constants, per tensor, channel or block
saturation weights whose products a kernel adds in 16 bits
bias       int32 biases with scale s_x * s_w that cannot overflow
blas       number of threads of matrix products
"""

from onnxq.numerics.bias import bias_qparams, floor_weight_scale
from onnxq.numerics.dynamic import choose_dynamic_qparams, fake_quant_dynamic, quantize_dynamic
from onnxq.numerics.ranges import clip_bounds, qparams_from_range, scale_floor, symmetric_steps
from onnxq.numerics.rounding import align_qparams, cast_scale, dequantize, fake_quant, list_quantized_values, quantize
from onnxq.numerics.saturation import (
    SumOrder,
    choose_widening,
    fake_quant_weight,
    find_partners,
    find_saturating_sums,
    limit_sums,
    needs_bound,
    pair_neighbours,
    quantize_weight,
    round_within_sum,
)
from onnxq.numerics.weights import check_weight_observer, weight_qparams

__all__ = [
    "SumOrder",
    "align_qparams",
    "bias_qparams",
    "cast_scale",
    "check_weight_observer",
    "choose_dynamic_qparams",
    "choose_widening",
    "clip_bounds",
    "dequantize",
    "fake_quant",
    "fake_quant_dynamic",
    "fake_quant_weight",
    "find_partners",
    "find_saturating_sums",
    "floor_weight_scale",
    "limit_sums",
    "list_quantized_values",
    "needs_bound",
    "pair_neighbours",
    "qparams_from_range",
    "quantize",
    "quantize_dynamic",
    "quantize_weight",
    "round_within_sum",
    "scale_floor",
    "symmetric_steps",
    "weight_qparams",
]
