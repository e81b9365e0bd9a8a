"""Quantization arithmetic in plain numpy. All rounding of onnxq is here.

rounding   quantize, dequantize, fake_quant, also on scales of each run, bit-identical to ONNX Runtime
ranges     [lo, hi] -> scale and zero point; the float Clip that enforces a narrow bit width; int32 biases that cannot
           overflow, with scale s_x * s_w
weights    ranges of constants, per tensor, channel or block
saturation weights whose products a kernel adds in 16 bits
threads    parts of large arrays on all cores; number of threads of matrix products
"""

from onnxq.numerics.ranges import (
    bias_qparams,
    clip_bounds,
    floor_weight_scale,
    qparams_from_range,
    scale_floor,
    symmetric_steps,
)
from onnxq.numerics.rounding import (
    align_qparams,
    cast_scale,
    dequantize,
    fake_quant,
    list_quantized_values,
    quantize,
)
from onnxq.numerics.weights import (
    SumOrder,
    SumOrders,
    check_weight_observer,
    choose_widening,
    fake_quant_weight,
    find_partners,
    find_saturating_sums,
    limit_sums,
    needs_bound,
    pair_neighbours,
    quantize_weight,
    round_within_sum,
    weight_qparams,
)

__all__ = [
    "SumOrder",
    "SumOrders",
    "align_qparams",
    "bias_qparams",
    "cast_scale",
    "check_weight_observer",
    "choose_widening",
    "clip_bounds",
    "dequantize",
    "fake_quant",
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
    "quantize_weight",
    "round_within_sum",
    "scale_floor",
    "symmetric_steps",
    "weight_qparams",
]
