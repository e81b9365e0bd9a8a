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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]

BLOCK = 16  # channels of one NCHWc block
UNKNOWN_ROWS = 1
UNKNOWN_ELEMENTS = 4096

Q_LAUNCH, Q_NS = 0.22, 0.05
DQ_LAUNCH, DQ_NS = 0.23, 0.075
# beside a float Conv: ReorderOutput and Transpose; Transpose, the guarding Clip and ReorderInput
FROM_CONV_LAUNCH, FROM_CONV_NS = 0.45, 0.115
TO_CONV_LAUNCH, TO_CONV_NS = 0.6, 0.17


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
    layout = FROM_CONV_LAUNCH + n * FROM_CONV_NS / 1e3 if from_conv else 0.0
    return Q_LAUNCH + n * Q_NS / 1e3 + layout


def dequantize_us(elements: int | None, *, to_conv: bool = False) -> float:
    """Cost of going from an int8 producer to float consumers: DequantizeLinear, and the way from NHWC to NCHWc."""
    n = UNKNOWN_ELEMENTS if elements is None else elements
    layout = TO_CONV_LAUNCH + n * TO_CONV_NS / 1e3 if to_conv else 0.0
    return DQ_LAUNCH + n * DQ_NS / 1e3 + layout


def op_cost(case: OpCase) -> Cost:
    """Time of one node, float and int8.

    Where sizes are unknown they are taken small. An operator without an int8 kernel costs its float time plus a pair.
    """
    return _MODELS.get(case.op_type, _moves)(case)


def _pad(n: int, multiple: int = BLOCK) -> int:
    return -(-n // multiple) * multiple


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

CONV_LAUNCH, CONV_INT8_LAUNCH = 0.4, 0.6
# what chains of equal Convs do not show: operands that other nodes have pushed out of the nearest cache
COLD_NS, COLD_INT8_NS = 0.02, 0.015
CLIP_NS = 0.065  # NCHWc kernels do Relu on the way out, Clip in a second pass; int8 ones need neither

# NCHWc: work of a row of outputs, in tiles of 6 and singly at the borders and the rest
FLOAT_GMACS = 134.0
FLOAT_GMACS_ONE_BLOCK = 106.0  # 16 output channels only
FLOAT_GMACS_NCHW = 125.0  # fewer than 16 input channels are read as they are
FLOAT_SINGLE = 0.47  # a single output costs 1 + this * (kernel - 1) / blocks
FLOAT_SINGLE_MOST = 5.0
FLOAT_PIXEL_NS = 0.12
FLOAT_REORDER_NS = 0.55  # an output that a Conv of fewer than 16 channels will read goes back to NCHW

# microseconds a million weights, by their number
STREAM_FLOAT: Mapping[int, float] = {65_000: 25.0, 300_000: 45.0, 1_300_000: 75.0, 5_000_000: 90.0}
STREAM_INT8: Mapping[int, float] = {65_000: 12.0, 300_000: 25.0, 1_300_000: 30.0, 5_000_000: 34.0}

INT8_GMACS = 552.0
INT8_IMAGE_NS = 0.17  # a map of 2 to 4 channels is the model's input: it comes in NCHW and is transposed
INT8_CHANNEL_NS = 0.018
INT8_GATHER_NS = 0.36
INT8_IN_NS: Mapping[int, float] = {1: 2.0, 3: 9.6, 4: 0.0, 6: 7.9, 8: 5.0, 12: 3.3, 16: 0.5}
INT8_IN_TAP_NS: Mapping[int, float] = {1: 1.2, 3: 0.1, 4: 0.3, 8: 0.47, 12: 0.66, 16: 0.28, 32: 0.0}
INT8_OUT_NS: Mapping[int, float] = {1: 4.0, 3: 2.9, 4: 4.8, 8: 1.0, 12: 3.0, 16: 0.0}


def _conv(case: OpCase) -> Cost:
    if case.weight is None:
        return _moves(case)
    cout, per_group, *kernel = case.weight
    spatial = case.output[2:] if case.output is not None else (7,) * len(kernel)
    batch = case.output[0] if case.output is not None else 1
    cin = per_group * case.group
    strides = case.strides or (1,) * len(kernel)
    if case.group == 1:
        float_us, int8_us = _dense(batch, spatial, cin, cout, kernel, strides)
    elif per_group == 1 and cin == cout:
        float_us, int8_us = _depthwise(batch, spatial, cin, math.prod(kernel), math.prod(strides))
    else:
        float_us, int8_us = _grouped(batch * math.prod(spatial), cin, cout, case.group, math.prod(kernel))
    written = batch * cout * math.prod(spatial)
    read = written * cin * math.prod(strides) // cout
    image = INT8_IMAGE_NS * read if 1 < cin <= 4 else 0.0
    clip = CLIP_NS * written if case.activation == "Clip" else 0.0
    return Cost(
        CONV_LAUNCH + float_us + (COLD_NS * (read + written) + clip) / 1e3,
        CONV_INT8_LAUNCH + int8_us + (COLD_INT8_NS * (read + written) + image) / 1e3,
    )


def _valid(size: int, kernel: int, stride: int) -> float:
    """Share of the taps along one axis that do not fall into the padding."""
    pad = (kernel - 1) // 2
    lost = 2 * sum(max(0, pad - i * stride) for i in range(min(size, pad)))
    return 1 - min(lost, size * (kernel - 1)) / (size * kernel)


def _work(spatial: Shape, kernel: Sequence[int], strides: Shape, blocks: int) -> float:
    """Work of one map in outputs.

    NCHWc kernels take rows in tiles of 6 outputs; what is left of a row and its borders is done singly, with as few
    accumulators as there are blocks. 1x1 kernels run over the whole map as one row.
    """
    if math.prod(kernel) == 1:
        return math.prod(spatial)
    border = min(spatial[1], -(-(kernel[1] - 1) // strides[1]))
    inner = spatial[1] - border
    single = 1 + min(FLOAT_SINGLE * (kernel[1] - 1), FLOAT_SINGLE_MOST) / min(blocks, 4)
    row = inner - inner % 6 + single * (inner % 6 + border)
    return spatial[0] * _valid(spatial[0], kernel[0], strides[0]) * row


def _stream(weights: float, table: Mapping[int, float]) -> float:
    """Microseconds to bring the weights in, which a large model never finds in the cache."""
    return weights * _interpolate(table, weights) / 1e6


def _dense(
    batch: int, spatial: Shape, cin: int, cout: int, kernel: Sequence[int], strides: Shape
) -> tuple[float, float]:
    taps, pixels = math.prod(kernel), batch * math.prod(spatial)
    weights = cin * cout * taps
    int8_us = pixels * _dense_int8_ns(cin, cout, taps) / 1e3 + _stream(weights, STREAM_INT8)
    if len(spatial) != 2:
        float_us = pixels * weights / _interpolate(LINE_GMACS, min(cin, cout)) / 1e3 + _stream(weights, STREAM_FLOAT)
    elif cin < BLOCK:
        work = batch * _work(spatial, kernel, strides, _pad(cout) // BLOCK) * cin * _pad(cout) * taps / FLOAT_GMACS_NCHW
        float_us = (work + pixels * (FLOAT_PIXEL_NS + FLOAT_REORDER_NS * cin)) / 1e3
    else:
        work = batch * _work(spatial, kernel, strides, _pad(cout) // BLOCK)
        gmacs = FLOAT_GMACS if cout > BLOCK else FLOAT_GMACS_ONE_BLOCK
        float_us = work * _pad(cin) * _pad(cout) * taps / gmacs / 1e3
        used = _valid(spatial[0], kernel[0], strides[0]) * _valid(spatial[1], kernel[1], strides[1])
        float_us += _stream(weights * used, STREAM_FLOAT)
    return float_us, int8_us


def _dense_int8_ns(cin: int, cout: int, taps: int) -> float:
    """Nanoseconds of one output pixel."""
    macs = _pad(cin * taps, 4) * _pad(cout) / INT8_GMACS
    gather = taps * (INT8_GATHER_NS + _interpolate(INT8_IN_TAP_NS, cin)) if taps > 1 else 0.0
    small = _interpolate(INT8_IN_NS, cin) + _interpolate(INT8_OUT_NS, cout)
    return macs + gather + INT8_CHANNEL_NS * (cin + cout) + small


LINE_GMACS: Mapping[int, float] = {1: 5.5, 4: 21.0, 16: 57.0, 32: 80.0, 64: 104.0, 128: 118.0}

DEPTHWISE_FLOAT_NS: Mapping[int, float] = {  # by the width of the map
    4: 0.18, 7: 0.172, 10: 0.187, 14: 0.19, 20: 0.174, 28: 0.145, 56: 0.128, 80: 0.115,
}  # fmt: skip
DEPTHWISE_FLOAT_TAPS = 0.68  # time grows with (taps/9) to this power
DEPTHWISE_FLOAT_SKIP_NS = 0.045  # of an input that stride leaves without an output
DEPTHWISE_INT8_TAP_NS, DEPTHWISE_INT8_NS = 0.42, 0.012
DEPTHWISE_INT8_PIXEL_NS, DEPTHWISE_INT8_CHANNEL_NS = 1.5, 0.039
DEPTHWISE_ODD_NS, DEPTHWISE_ODD4_NS = 0.042, 1.6
DEPTHWISE_LAUNCH = 0.23
LINE_DEPTHWISE_GROUP_NS, LINE_DEPTHWISE_TAP_NS = 44.0, 0.105


def _depthwise(batch: int, spatial: Shape, channels: int, taps: int, skip: int) -> tuple[float, float]:
    """`skip`: inputs for each output, the product of the strides."""
    pixels = batch * math.prod(spatial)
    int8_ns = taps * (DEPTHWISE_INT8_TAP_NS + DEPTHWISE_INT8_NS * channels)
    int8_ns += DEPTHWISE_INT8_PIXEL_NS + DEPTHWISE_INT8_CHANNEL_NS * channels
    if channels % BLOCK:
        int8_ns += taps * (DEPTHWISE_ODD_NS * channels + (DEPTHWISE_ODD4_NS if channels % 8 else 0.0))
    if len(spatial) == 2:
        element = _interpolate(DEPTHWISE_FLOAT_NS, spatial[1]) * (taps / 9) ** DEPTHWISE_FLOAT_TAPS
        float_us = pixels * _pad(channels) * (element + DEPTHWISE_FLOAT_SKIP_NS * (skip - 1)) / 1e3
    else:
        float_us = channels * (batch * LINE_DEPTHWISE_GROUP_NS + pixels * taps * LINE_DEPTHWISE_TAP_NS) / 1e3
    return float_us, DEPTHWISE_LAUNCH + pixels * int8_ns / 1e3


GROUPED_FLOAT_GMACS: Mapping[int, float] = {1: 3.0, 2: 7.5, 4: 18.0, 8: 30.0, 12: 45.0, 24: 70.0, 32: 75.0}
GROUPED_INT8_NS, GROUPED_INT8_TAP_NS, GROUPED_INT8_CHANNEL_NS = 1.7, 2.2, 0.055


def _grouped(pixels: int, cin: int, cout: int, group: int, taps: int) -> tuple[float, float]:
    into, out = cin // group, cout // group
    if into % BLOCK or out % BLOCK:
        gmacs = _interpolate(GROUPED_FLOAT_GMACS, into)
    else:
        gmacs = FLOAT_GMACS if out > BLOCK else FLOAT_GMACS_ONE_BLOCK
    int8_ns = _pad(into * taps, 4) * _pad(out) / INT8_GMACS
    int8_ns += GROUPED_INT8_NS + taps * (GROUPED_INT8_TAP_NS + GROUPED_INT8_CHANNEL_NS * into)
    weights = into * cout * taps
    float_us = pixels * weights / gmacs / 1e3 + _stream(weights, STREAM_FLOAT)
    return float_us, pixels * group * int8_ns / 1e3 + _stream(weights, STREAM_INT8)


# --- Gemm and MatMul ------------------------------------------------------------------------------------------------

GEMM_LAUNCH, GEMM_INT8_LAUNCH = 0.24, 0.79
GEMM_GMACS, GEMM_INT8_GMACS = 124.0, 385.0
GEMV_GMACS, GEMV_INT8_GMACS = 30.0, 62.0  # what a single row reaches
GEMM_ROW_NS, GEMM_OUT_NS = 5.0, 0.01
GEMM_INT8_ROW_NS, GEMM_INT8_OUT_NS, GEMM_INT8_IN_NS = 9.0, 0.02, 0.01
MATMUL_BIAS_LAUNCH, MATMUL_BIAS_NS = 0.35, 0.083  # the Add that a float Gemm does not need
MATMUL_INT8_BIAS_LAUNCH, MATMUL_INT8_BIAS_NS = 0.01, 0.03
GEMM_STREAM_FLOAT: Mapping[int, float] = {65_000: 13.0, 150_000: 15.0, 262_000: 78.0, 600_000: 130.0, 1_300_000: 130.0}
GEMM_STREAM_INT8: Mapping[int, float] = {65_000: 5.0, 150_000: 5.0, 262_000: 19.0, 600_000: 32.0, 1_300_000: 30.0}
STREAM_ONE_ROW, STREAM_ALL_ROWS = 0.35, 16  # one row hides most of the stream, from 16 rows on none


def _linear(case: OpCase) -> Cost:
    """Gemm (uint8 in, uint8 out) and MatMul by a constant (uint8 in, float out)."""
    if case.weight is None or len(case.weight) < 2:
        return _moves(case)
    weights = math.prod(case.weight)
    outputs, rows = case.weight[-1], UNKNOWN_ROWS
    if case.output:
        outputs = case.output[-1]
        rows = max(1, math.prod(case.output[:-1]))
    depth = weights // max(outputs, 1)
    exposed = weights * min(1.0, STREAM_ONE_ROW + (1 - STREAM_ONE_ROW) * math.log(rows, STREAM_ALL_ROWS)) / 1e6
    float_us = GEMM_LAUNCH + max(rows / GEMM_GMACS, 1 / GEMV_GMACS) * weights / 1e3
    float_us += rows * (GEMM_ROW_NS + outputs * GEMM_OUT_NS) / 1e3 + exposed * _interpolate(GEMM_STREAM_FLOAT, weights)
    int8_us = GEMM_INT8_LAUNCH + max(rows / GEMM_INT8_GMACS, 1 / GEMV_INT8_GMACS) * weights / 1e3
    int8_us += rows * (GEMM_INT8_ROW_NS + outputs * GEMM_INT8_OUT_NS + depth * GEMM_INT8_IN_NS) / 1e3
    int8_us += exposed * _interpolate(GEMM_STREAM_INT8, weights)
    if case.op_type == "MatMul":
        float_us += MATMUL_BIAS_LAUNCH + rows * outputs * MATMUL_BIAS_NS / 1e3
        int8_us += MATMUL_INT8_BIAS_LAUNCH + rows * outputs * MATMUL_INT8_BIAS_NS / 1e3
    return Cost(float_us, int8_us)


# --- everything that moves elements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """Cost of an operator by elements: microseconds to launch, nanoseconds an element.

    odd_ns: more for each element of a float map whose channels do not fill NCHWc blocks (it goes back to NCHW).
    pixel_ns, odd_pixel_ns: of int8 kernels that go pixel by pixel, and more of it where channels do not fill vectors.
    taps: times are for one tap of the kernel.
    """

    float_us: float
    float_ns: float
    int8_us: float
    int8_ns: float
    odd_ns: float = 0.0
    pixel_ns: float = 0.0
    odd_pixel_ns: float = 0.0
    taps: bool = False


NOTHING = Moves(0.0, 0.0, 0.0, 0.0)
VIEW = Moves(0.3, 0.0, 0.3, 0.0)
ADD = Moves(0.4, 0.2, 0.5, 0.11)
ADD_CONV = Moves(0.05, 0.03, 0.5, 0.11)  # in the Conv in front of it, the usual case on maps
GATE = Moves(0.6, 0.17, 0.5, 0.1, odd_ns=0.12, pixel_ns=6.5, odd_pixel_ns=10.0)

ELEMENTS: Mapping[str, Moves] = {
    "Add": ADD,
    "Mul": Moves(0.1, 0.03, 0.35, 0.17),  # nearly always x * sigmoid(x), one kernel in float
    "Concat": Moves(0.1, 0.04, 0.1, 0.01, odd_ns=0.16, pixel_ns=3.0),
    "MaxPool": Moves(0.25, 0.011, 0.3, 0.0095, odd_ns=0.07, pixel_ns=0.6, taps=True),
    "AveragePool": Moves(0.25, 0.011, 0.4, 0.45, odd_ns=0.09, taps=True),
    "GlobalAveragePool": Moves(0.7, 0.06, 0.35, 0.05, odd_ns=0.1),
    "Sigmoid": Moves(0.15, 0.22, 0.2, 0.235),
    "LeakyRelu": Moves(0.65, 0.29, 0.2, 0.23, odd_ns=0.05),
    "Resize": Moves(0.3, 0.12, 0.5, 0.08, odd_ns=0.05),
    "Transpose": Moves(0.4, 0.25, 0.4, 0.07),
    "DepthToSpace": Moves(0.5, 0.25, 0.5, 0.07),
    "SpaceToDepth": Moves(0.5, 0.25, 0.5, 0.07),
    "Slice": Moves(0.4, 0.1, 0.4, 0.05),
    "Pad": Moves(0.4, 0.15, 0.4, 0.07),
    "Relu": NOTHING,
    "Clip": NOTHING,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"), VIEW),
}
UNKNOWN_OPERATOR = Moves(0.3, 0.1, 0.3 + Q_LAUNCH + DQ_LAUNCH, 0.1 + Q_NS + DQ_NS)


def _row_of(case: OpCase) -> Moves:
    shape = case.output
    if case.op_type == "Add" and shape is not None and len(shape) == 4:
        return ADD_CONV
    if case.op_type == "Mul" and any(known is not None and known != shape for known in case.inputs):
        return GATE
    return ELEMENTS.get(case.op_type, UNKNOWN_OPERATOR)


def _moves(case: OpCase) -> Cost:
    """Without sizes int8 never looks cheaper than float."""
    row = _row_of(case)
    shapes = [shape for shape in (case.output, *case.inputs) if shape is not None]
    shape = max(shapes, key=math.prod) if case.op_type == "GlobalAveragePool" and shapes else case.output
    if shape is None:
        shape = shapes[0] if shapes else None
    elements = UNKNOWN_ELEMENTS if shape is None else math.prod(shape)
    channels = shape[1] if shape is not None and len(shape) > 2 else BLOCK
    odd = channels % BLOCK != 0
    taps = math.prod(case.kernel) if row.taps and case.kernel else 1
    pixel_ns = (row.pixel_ns + row.odd_pixel_ns * odd) / max(channels, 1)
    float_us = row.float_us + elements * taps * (row.float_ns + row.odd_ns * odd) / 1e3
    int8_us = row.int8_us + elements * taps * (row.int8_ns + pixel_ns) / 1e3
    return Cost(float_us, max(float_us, int8_us) if shape is None else int8_us)


_MODELS: Mapping[str, Callable[[OpCase], Cost]] = {"Conv": _conv, "Gemm": _linear, "MatMul": _linear}
