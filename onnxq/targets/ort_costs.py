"""What a node costs in ONNX Runtime's CPU provider, float and int8: the numbers behind the placement min-cut.

Microseconds of one thread on x86 with AVX512-VNNI, fitted to onnxruntime 1.31 by `benchmarks/op_costs.py`. The
model is static: shapes in, time out, so that the same graph is always placed the same way. Only differences and
ratios matter; another machine scales both sides.

    time = launch + work / throughput + elements * ns

float Convs run in NCHWc (channels padded to 16), int8 ones in NHWC: what it costs to go from one to the other is part
of `quantize_us` and `dequantize_us`. int8 means uint8 activations, int8 weights with zero point 0, and the pair on the
output where the kernel needs one; MatMul is MatMulIntegerToFloat with its bias Add, the pair on its input not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]

BLOCK = 16  # channels of one NCHWc block
UNKNOWN_PIXELS = 49  # a small map: where sizes are unknown launches dominate, which favours float
UNKNOWN_ROWS = 1
UNKNOWN_ELEMENTS = 4096

Q_LAUNCH, Q_NS = 0.3, 0.05
DQ_LAUNCH, DQ_NS = 0.3, 0.075
TO_NHWC_LAUNCH, TO_NHWC_NS = 0.6, 0.15
TO_NCHWC_LAUNCH, TO_NCHWC_NS = 0.6, 0.18


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One node as its cost sees it; a shape that is not known is None."""

    op_type: str
    inputs: tuple[Shape | None, ...]
    output: Shape | None
    weight: Shape | None = None
    group: int = 1
    kernel: Shape = ()
    strides: Shape = ()
    activation: str = ""


@dataclass(frozen=True)
class Cost:
    """Microseconds of one node inside a float region and inside an int8 region."""

    float_us: float
    int8_us: float


def quantize_us(elements: int | None, *, from_conv: bool = False) -> float:
    """Cost of going from a float producer to int8 consumers: QuantizeLinear, and the way from NCHWc to NHWC."""
    n = UNKNOWN_ELEMENTS if elements is None else elements
    layout = TO_NHWC_LAUNCH + n * TO_NHWC_NS / 1e3 if from_conv else 0.0
    return Q_LAUNCH + n * Q_NS / 1e3 + layout


def dequantize_us(elements: int | None, *, to_conv: bool = False) -> float:
    """Cost of going from an int8 producer to float consumers: DequantizeLinear, and the way from NHWC to NCHWc."""
    n = UNKNOWN_ELEMENTS if elements is None else elements
    layout = TO_NCHWC_LAUNCH + n * TO_NCHWC_NS / 1e3 if to_conv else 0.0
    return DQ_LAUNCH + n * DQ_NS / 1e3 + layout


def op_cost(case: OpCase) -> Cost:
    """Time of one node, float and int8.

    Where sizes are unknown they are taken small. An operator without an int8 kernel costs its float time plus a pair.
    """
    model = _MODELS.get(case.op_type)
    if model is not None:
        return model(case)
    elements = _elements(case)
    return _plain(case, 0.3, 0.1, 0.3 + Q_LAUNCH + DQ_LAUNCH, 0.1 + Q_NS + DQ_NS, elements)


def _pad(n: int, multiple: int = BLOCK) -> int:
    return -(-n // multiple) * multiple


def _elements(case: OpCase) -> int | None:
    """Elements the node moves: the larger of its output and its largest input."""
    known = [math.prod(shape) for shape in (case.output, *case.inputs) if shape is not None]
    return max(known) if known else None


def _interpolate(table: Mapping[int, float], x: float) -> float:
    """Piecewise linear in log(x), constant beyond both ends."""
    points = sorted(table)
    if x <= points[0]:
        return table[points[0]]
    for low, high in pairwise(points):
        if x <= high:
            t = math.log(x / low) / math.log(high / low)
            return table[low] + t * (table[high] - table[low])
    return table[points[-1]]


# --- Conv -----------------------------------------------------------------------------------------------------------

FLOAT_GMACS, FLOAT_GMACS_ONE_BLOCK = 135.0, 102.0
FLOAT_GMACS_NCHW = 110.0  # fewer than 16 input channels are read as they are
INT8_GMACS = 515.0
DEPTHWISE_FLOAT_WIDTH: Mapping[int, float] = {4: 1.2, 7: 1.35, 14: 1.6, 28: 1.1, 56: 1.0}


def _conv(case: OpCase) -> Cost:
    if case.weight is None:
        return _plain(case, 0.3, 0.2, 0.6, 0.4, _elements(case))
    cout, per_group, *kernel = case.weight
    taps = math.prod(kernel)
    pixels, width = UNKNOWN_PIXELS, 7
    if case.output is not None:
        pixels = case.output[0] * math.prod(case.output[2:])
        width = case.output[-1]
    cin = per_group * case.group
    if case.group == 1:
        return _dense(pixels, cin, cout, taps)
    if per_group == 1 and cin == cout and taps > 1:
        return _depthwise(pixels, width, cin, taps)
    return _grouped(pixels, cin, cout, case.group, taps)


def _dense(pixels: int, cin: int, cout: int, taps: int) -> Cost:
    lanes = _pad(cout)
    if cin < BLOCK:
        float_ns = cin * lanes * taps / FLOAT_GMACS_NCHW + 0.35 * cin
    else:
        gmacs = FLOAT_GMACS if lanes > BLOCK else FLOAT_GMACS_ONE_BLOCK
        float_ns = _pad(cin) * lanes * taps / gmacs
    return Cost(0.35 + pixels * float_ns / 1e3, 0.5 + pixels * _dense_int8_ns(cin, cout, taps) / 1e3)


def _dense_int8_ns(cin: int, cout: int, taps: int) -> float:
    macs = _pad(cin * taps, 4) * _pad(cout) / INT8_GMACS
    gather = taps * (0.25 + 0.006 * cin) if taps > 1 else 0.0
    odd = 0.5 if cin % BLOCK or cout % BLOCK else 0.0
    if cin < BLOCK:
        gather += 0.35 * taps + (8.0 if cin % 4 else 0.25 * cin)
    return 1.2 + macs + gather + 0.01 * (cin + cout) + odd


def _depthwise(pixels: int, width: int, channels: int, taps: int) -> Cost:
    blocks = _pad(channels)
    per_tap = 0.015 if taps < 16 else 0.0105
    float_ns = blocks * taps * per_tap * _interpolate(DEPTHWISE_FLOAT_WIDTH, width)
    int8_ns = taps * (0.6 + 0.0135 * channels) + 0.012 * channels
    if channels % BLOCK:
        int8_ns += taps * 0.1 * channels
        float_ns += 0.3 * channels * (channels % 4 != 0)
    return Cost(0.35 + pixels * float_ns / 1e3, 0.8 + pixels * int8_ns / 1e3)


def _grouped(pixels: int, cin: int, cout: int, group: int, taps: int) -> Cost:
    into, out = cin // group, cout // group
    macs = cin // group * cout * taps
    aligned = into % BLOCK == 0 and out % BLOCK == 0
    float_ns = macs / (FLOAT_GMACS if aligned else 15.0 + 1.5 * min(into, 32))
    per_group = _dense_int8_ns(max(into, BLOCK), max(out, BLOCK), taps)
    return Cost(0.4 + pixels * float_ns / 1e3, 0.6 + pixels * group * per_group / 1e3)


# --- Gemm and MatMul ------------------------------------------------------------------------------------------------

STREAM_FLOAT_GBS, STREAM_INT8_GBS = 60.0, 40.0  # weights read once from L2/L3


def _linear(case: OpCase) -> Cost:
    """Gemm (int8 in, int8 out) and MatMul by a constant (uint8 in, float out)."""
    if case.weight is None or len(case.weight) < 2:
        return _plain(case, 0.5, 0.5, 1.0, 1.0, _elements(case))
    weights = math.prod(case.weight)
    outputs, rows = case.weight[-1], UNKNOWN_ROWS
    if case.output is not None:
        outputs = case.output[-1]
        rows = math.prod(case.output[:-1])
    depth = weights // max(outputs, 1)
    macs = rows * weights
    stream_float = weights * 4 / STREAM_FLOAT_GBS / 1e3
    stream_int8 = weights / STREAM_INT8_GBS / 1e3
    float_us = 0.4 + macs / 125.0 / 1e3 + stream_float + rows * outputs * 0.03 / 1e3
    int8_us = 0.8 + macs / 380.0 / 1e3 + stream_int8 + rows * (outputs * 0.25 + depth * 0.02) / 1e3
    return Cost(float_us, int8_us)


# --- everything that moves elements ---------------------------------------------------------------------------------


def _plain(
    case: OpCase, float_launch: float, float_ns: float, int8_launch: float, int8_ns: float, elements: int | None
) -> Cost:
    """launch + elements * ns; without sizes int8 never looks cheaper than float."""
    n = UNKNOWN_ELEMENTS if elements is None else elements
    float_us = float_launch + n * float_ns / 1e3
    int8_us = int8_launch + n * int8_ns / 1e3
    return Cost(float_us, max(float_us, int8_us) if elements is None else int8_us)


# operator: (float launch us, float ns an element, int8 launch us, int8 ns an element)
ELEMENTWISE: Mapping[str, tuple[float, float, float, float]] = {
    "Add": (0.5, 0.24, 0.6, 0.17),
    "Mul": (0.5, 0.16, 0.6, 0.19),
    "Concat": (0.5, 0.12, 0.6, 0.06),
    "MaxPool": (0.3, 0.10, 0.5, 0.16),
    "GlobalAveragePool": (0.4, 0.08, 0.5, 0.05),
    "AveragePool": (0.3, 0.10, 0.5, 0.6),
    "Sigmoid": (0.3, 0.21, 0.3, 0.23),
    "LeakyRelu": (0.6, 0.29, 0.3, 0.23),
    "Resize": (0.8, 0.30, 0.8, 0.25),
    "Transpose": (0.5, 0.30, 0.5, 0.15),
    "Slice": (0.5, 0.10, 0.5, 0.05),
    "Pad": (0.5, 0.15, 0.5, 0.08),
    "DepthToSpace": (0.6, 0.30, 0.6, 0.15),
    "SpaceToDepth": (0.6, 0.30, 0.6, 0.15),
    "Relu": (0.0, 0.0, 0.0, 0.0),  # fused
    "Clip": (0.0, 0.0, 0.0, 0.0),
    "Reshape": (0.3, 0.0, 0.3, 0.0),
    "Flatten": (0.3, 0.0, 0.3, 0.0),
    "Squeeze": (0.3, 0.0, 0.3, 0.0),
    "Unsqueeze": (0.3, 0.0, 0.3, 0.0),
}


def _elementwise(case: OpCase) -> Cost:
    return _plain(case, *ELEMENTWISE[case.op_type], _elements(case))


_MODELS: Mapping[str, Callable[[OpCase], Cost]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "Conv": _conv,
    "Gemm": _linear,
    "MatMul": _linear,
}
