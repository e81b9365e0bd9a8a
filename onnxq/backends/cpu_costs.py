"""Time of a node in an engine on the CPU, float and int8, for the minimum cut of placement.

Microseconds of one thread, from the constants of an engine and a kind of CPU. The model is static: shapes in, time out,
so that the same graph is always placed the same way. Only ratios matter: another machine scales both sides.

    time = launch + work / throughput + elements * ns

int8 means uint8 activations, int8 weights with zero point 0, and the pair on the output where the kernel needs one;
MatMul is MatMulIntegerToFloat with its bias Add, the pair on its input not counted.

Units of the constants, by the end of a name: `_us` and `_launch` microseconds, `_ns` nanoseconds per element, `_gmacs`
multiplications per nanosecond.

The terms are those of ONNX Runtime's kernels, whose names the fields have; an engine that lacks one has 0 there.
Measured for x86 with and without VNNI, each in a data file of its backend; nobody has measured an ARM.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from onnxq.arrays import Shape
from onnxq.backends import costs
from onnxq.backends.costs import Cost, OpCase

# Values by size; see `interpolate` for sizes between.
Table = Mapping[int, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairCosts:
    """Times of QuantizeLinear and DequantizeLinear."""

    q_launch: float
    q_ns: float
    dq_launch: float
    dq_ns: float
    # On top of QuantizeLinear, for a scale that is computed at each run: measured with VNNI on 384 to 196608 values of
    # one tensor (2026-11-22); with AVX2 in the ratio to QuantizeLinear that was measured there.
    dynamic_launch: float
    dynamic_ns: float
    # On top, behind a float Conv: ReorderOutput and Transpose.
    from_conv_launch: float
    from_conv_ns: float
    # On top, in front of a float Conv: Transpose, the guarding Clip and ReorderInput.
    to_conv_launch: float
    to_conv_ns: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvCosts:
    """Constants of dense and grouped Conv."""

    # Channels of one NCHWc block of the float kernels, and outputs of a row that they compute at once.
    block: int
    row_tile: int
    launch: float
    int8_launch: float
    # Operands that other nodes have pushed out of the nearest cache; chains of equal Convs do not show these.
    cold_ns: float
    int8_cold_ns: float
    # NCHWc kernels compute Relu on the way out and Clip in a second pass; int8 ones need neither.
    clip_ns: float
    # By blocks of output channels; `_nchw`: for inputs of less than a block, which are read as they are.
    float_gmacs: Table
    float_gmacs_nchw: float
    # A single output of a row costs 1 + float_single * (kernel - 1) / blocks, the addend at most float_single_most.
    float_single: float
    float_single_most: float
    float_pixel_ns: float
    # An output that a Conv of less than a block will read goes back to NCHW.
    float_reorder_ns: float
    # Microseconds per million weights to bring them in from memory, by their number.
    stream_float: Table
    stream_int8: Table
    int8_gmacs: float
    # A map of 2 to 4 channels is the model's input: it comes in NCHW and is transposed.
    int8_image_ns: float
    int8_channel_ns: float
    int8_gather_ns: float
    # Per output pixel, by input channels, the same for each tap, and by output channels.
    int8_in_ns: Table
    int8_in_tap_ns: Table
    int8_out_ns: Table
    # Float Conv of one or three dimensions, by the smaller number of channels.
    line_gmacs: Table
    # By input channels of a group.
    grouped_float_gmacs: Table
    grouped_int8_ns: float
    grouped_int8_tap_ns: float
    grouped_int8_channel_ns: float
    # On top per tap of an int8 Conv of three dimensions, which is gathered by itself.
    volume_tap_ns: float = 0.0
    # Squares of input channels times results of one channel, above which an engine computes a transposed Conv in float.
    transposed_most: float = math.inf


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthwiseCosts:
    """Constants of Conv of one input and one output channel per group."""

    # By the width of the map.
    float_ns: Table
    # Time grows with (taps / 9) to this power.
    float_taps: float
    # Per input that a stride leaves without an output.
    float_skip_ns: float
    int8_launch: float
    int8_tap_ns: float
    int8_ns: float
    int8_pixel_ns: float
    int8_channel_ns: float
    # On top for a channel count that fills no vector of 16, and of 8.
    odd_ns: float
    odd4_ns: float
    # Conv of one or three dimensions, which is computed group by group.
    line_group_ns: float
    line_tap_ns: float


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearCosts:
    """Constants of Gemm and MatMul."""

    launch: float
    int8_launch: float
    gmacs: float
    int8_gmacs: float
    # Reached by a product with a single row.
    one_row_gmacs: float
    int8_one_row_gmacs: float
    row_ns: float
    out_ns: float
    int8_row_ns: float
    int8_out_ns: float
    int8_in_ns: float
    # The Add behind a MatMul, which a Gemm does not need.
    matmul_bias_launch: float
    matmul_bias_ns: float
    matmul_int8_bias_launch: float
    matmul_int8_bias_ns: float
    # Microseconds per million weights to bring them in from memory, by their number; one row hides most of it.
    stream_float: Table
    stream_int8: Table


@dataclass(frozen=True, eq=False)
class Moves:
    """Times of an operator that depend on the number of elements: microseconds to launch, nanoseconds per element."""

    float_us: float
    float_ns: float
    int8_us: float
    int8_ns: float
    # On top per element of a float map whose channels do not fill NCHWc blocks, so that it goes back to NCHW.
    odd_ns: float = 0.0
    # Per pixel of int8 kernels that go pixel by pixel, and on top where channels do not fill vectors.
    pixel_ns: float = 0.0
    odd_pixel_ns: float = 0.0
    # Times are per tap of the kernel.
    taps: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuCosts:
    """The constants of one kind of CPU."""

    name: str
    # The machine, the version and the day of the measurement.
    origin: str
    # Factor on products in integers: their time in whole networks over that in chains of equal nodes, beyond the
    # same factor of float ones.
    int8_network: float
    pairs: PairCosts
    conv: ConvCosts
    depthwise: DepthwiseCosts
    linear: LinearCosts
    # By operator; also "residual" (an Add that the Conv in front computes as well, the usual case on maps), "gate" (a
    # Mul of a map by one value per channel) and "unknown" (any other operator, without the pair around it). "Mul" is
    # nearly always x * sigmoid(x), one kernel in float.
    elements: Mapping[str, Moves]
    # Whether an LSTM's state is multiplied as slowly as with AMX: in a file for any CPU, and where nobody measured it.
    slow_state: bool = False

    def predict_quantize(
        self, elements: int | None, *, from_conv: bool = False, dynamic: bool = False
    ) -> float:
        """As `MachineCosts` has it: QuantizeLinear, and the change from NCHWc to NHWC behind a Conv."""
        n = costs.UNKNOWN_ELEMENTS if elements is None else elements
        pairs = self.pairs
        layout = pairs.from_conv_launch + n * pairs.from_conv_ns / 1e3 if from_conv else 0.0
        scale = pairs.dynamic_launch + n * pairs.dynamic_ns / 1e3 if dynamic else 0.0
        return pairs.q_launch + n * pairs.q_ns / 1e3 + layout + scale

    def predict_dequantize(self, elements: int | None, *, to_conv: bool = False) -> float:
        """As `MachineCosts` has it: DequantizeLinear, and the change from NHWC to NCHWc before a Conv."""
        n = costs.UNKNOWN_ELEMENTS if elements is None else elements
        pairs = self.pairs
        layout = pairs.to_conv_launch + n * pairs.to_conv_ns / 1e3 if to_conv else 0.0
        return pairs.dq_launch + n * pairs.dq_ns / 1e3 + layout

    def predict_node(self, case: OpCase) -> Cost:
        """Time of one node, float and int8. One without an int8 kernel costs its float time plus a pair."""
        weight = case.weight or ()
        if case.op_type == "LSTM" and len(weight) == costs.LSTM_RANK:
            cost = _compute_lstm_cost(case, self)
        elif case.op_type == "Conv" and weight:
            cost = conv_cost(case, weight, self)
        elif case.op_type == "ConvTranspose" and weight:
            cost = _compute_transposed_cost(case, weight, self)
        elif case.op_type in ("Gemm", "MatMul") and len(weight) > 1:
            cost = _compute_linear_cost(case, weight, self)
        else:
            return _compute_moves_cost(case, self)
        return Cost(cost.float_us, cost.int8_us * self.int8_network)


def round_up(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def interpolate(table: Table, x: float) -> float:
    """The table at x: piecewise linear in log(x), constant beyond both ends."""
    points, values = zip(*sorted(table.items()), strict=True)
    return float(np.interp(math.log(max(x, points[0])), np.log(points), values))


# Share of the time to bring weights in that shows: one row hides most of it, 16 rows and more none.
STREAM_ONE_ROW = 0.35
STREAM_ALL_ROWS = 16


def parse_costs(text: str) -> CpuCosts:
    """The table in a data file, as `benchmarks/op_costs.py fit` writes it."""
    table = json.loads(text)
    for name, kind in _GROUPS.items():
        table[name] = kind(**{field: _parse_table(value) for field, value in table[name].items()})
    table["elements"] = {op_type: Moves(**times) for op_type, times in table["elements"].items()}
    return CpuCosts(**table)


_GROUPS = {
    "pairs": PairCosts,
    "conv": ConvCosts,
    "depthwise": DepthwiseCosts,
    "linear": LinearCosts,
}


def _parse_table(value: Any) -> Any:
    # JSON has words for keys only, a table has sizes.
    return {int(size): entry for size, entry in value.items()} if isinstance(value, dict) else value


def _compute_linear_cost(case: OpCase, weight: Shape, cpu: CpuCosts, stream: float = 1) -> Cost:
    """Gemm (uint8 in, uint8 out) and MatMul by a constant (uint8 in, float out); `stream` of bringing weights in."""
    linear = cpu.linear
    weights = math.prod(weight)
    outputs = weight[-1]
    rows = costs.UNKNOWN_ROWS
    if case.output:
        outputs = case.output[-1]
        rows = max(1, math.prod(case.output[:-1]))
    depth = weights // max(outputs, 1)
    # Microseconds per million weights, as the tables have them.
    share = STREAM_ONE_ROW + (1 - STREAM_ONE_ROW) * math.log(rows, STREAM_ALL_ROWS)
    exposed = stream * weights * min(1.0, share) / 1e6
    float_us = linear.launch + max(rows / linear.gmacs, 1 / linear.one_row_gmacs) * weights / 1e3
    float_us += rows * (linear.row_ns + outputs * linear.out_ns) / 1e3
    float_us += exposed * interpolate(linear.stream_float, weights)
    product_ns = max(rows / linear.int8_gmacs, 1 / linear.int8_one_row_gmacs) * weights
    row_ns = linear.int8_row_ns + outputs * linear.int8_out_ns + depth * linear.int8_in_ns
    int8_us = linear.int8_launch + product_ns / 1e3 + rows * row_ns / 1e3
    int8_us += exposed * interpolate(linear.stream_int8, weights)
    if case.op_type == "MatMul":
        float_us += linear.matmul_bias_launch + rows * outputs * linear.matmul_bias_ns / 1e3
        if case.pointwise and len(case.output or ()) > 2:
            taps = OpCase(op_type="Conv", inputs=(), output=(1, outputs, 1, rows))
            int8_us = conv_cost(taps, (outputs, depth, 1, 1), cpu).int8_us
        bias_ns = rows * outputs * linear.matmul_int8_bias_ns
        int8_us += linear.matmul_int8_bias_launch + bias_ns / 1e3
    return Cost(float_us, int8_us)


def _compute_lstm_cost(case: OpCase, cpu: CpuCosts) -> Cost:
    """DynamicQuantizeLSTM."""

    def multiply(part: OpCase) -> Cost:
        return _compute_linear_cost(part, part.weight or (), cpu)

    def step(part: OpCase) -> Cost:
        cost = _compute_linear_cost(part, part.weight or (), cpu, costs.LSTM_STREAM)
        # Products of a step are launched without nodes of their own.
        cost = Cost(cost.float_us - cpu.linear.launch, cost.int8_us - cpu.linear.int8_launch)
        quantize_ns = cpu.pairs.q_ns + cpu.pairs.dynamic_ns
        return costs.complete_step(cost, part, quantize_ns, slow=cpu.slow_state)

    return costs.sum_lstm(case, multiply, step)


def name_kind(case: OpCase) -> str:
    """The row of a table of costs for a node that is no product: its use, else its operator."""
    if case.op_type in ("Relu", "Clip"):
        return "folded"
    if case.op_type == "Add" and case.output is not None and len(case.output) == 4:
        return "residual"
    gate = case.op_type == "Mul" and set(case.inputs) - {case.output, None}
    return "gate" if gate else case.op_type


def _compute_moves_cost(case: OpCase, cpu: CpuCosts) -> Cost:
    """Time of an operator by its elements. Without sizes int8 is never cheaper than float."""
    kind = name_kind(case)
    if kind == "folded":
        return Cost(0.0, 0.0)
    row = cpu.elements.get(kind, cpu.elements["unknown"])
    shapes = [shape for shape in (case.output, *case.inputs) if shape is not None]
    shape = shapes[0] if shapes else None
    if case.op_type == "GlobalAveragePool":
        shape = max(shapes, key=math.prod, default=None)
    elements = costs.UNKNOWN_ELEMENTS if shape is None else math.prod(shape)
    channels = shape[1] if shape and len(shape) > 2 else INT8_BLOCK
    taps = math.prod(case.kernel) if row.taps else 1
    pixel_ns = (row.pixel_ns + row.odd_pixel_ns * (channels % INT8_BLOCK != 0)) / max(channels, 1)
    float_ns = row.float_ns + row.odd_ns * (channels % cpu.conv.block != 0)
    float_us = row.float_us + elements * taps * float_ns / 1e3
    int8_us = row.int8_us + elements * taps * (row.int8_ns + pixel_ns) / 1e3
    if kind not in cpu.elements:
        # Its kernel computes in float between integers: with the pair around it.
        int8_us += cpu.predict_quantize(elements) + cpu.predict_dequantize(elements)
    return Cost(float_us, max(float_us, int8_us) if shape is None else int8_us)


# Channels that the int8 kernels compute at once, on all kinds of x86.
INT8_BLOCK = 16


def conv_cost(case: OpCase, weight: Shape, cpu: CpuCosts) -> Cost:
    """Time of a Conv with a constant weight."""
    conv = cpu.conv
    cout, per_group, *kernel = weight
    # An unknown size is taken for a small map.
    batch, _, *spatial = case.output or (1, cout, *[7] * len(kernel))
    cin = per_group * case.group
    strides = case.strides or (1,) * len(kernel)
    pixels = batch * math.prod(spatial)
    taps = math.prod(kernel)
    skip = math.prod(strides)
    if case.group == 1:
        float_us = _compute_dense_float_us(batch, spatial, cin, cout, kernel, strides, conv)
        int8_us = pixels * _compute_dense_int8_ns(cin, cout, taps, conv) / 1e3
        int8_us += _compute_stream_us(math.prod(weight), conv.stream_int8)
    elif per_group == 1 and cin == cout:
        float_us, int8_us = _compute_depthwise_us(batch, spatial, cin, taps, skip, cpu)
    else:
        float_us, int8_us = _compute_grouped_us(pixels, cin, cout, case.group, taps, conv)
    written = pixels * cout
    read = pixels * cin * skip
    image = conv.int8_image_ns * read if 1 < cin <= 4 else 0.0
    volume = conv.volume_tap_ns * pixels * taps if len(kernel) > 2 else 0.0
    clip = conv.clip_ns * written if case.activation == "Clip" else 0.0
    return Cost(
        conv.launch + float_us + (conv.cold_ns * (read + written) + clip) / 1e3,
        conv.int8_launch + int8_us + (conv.int8_cold_ns * (read + written) + image + volume) / 1e3,
    )


def _compute_transposed_cost(case: OpCase, weight: Shape, cpu: CpuCosts) -> Cost:
    cost = conv_cost(*costs.turn_transposed(case, weight), cpu)
    positions = math.inf if case.output is None else math.prod(case.output[2:])
    if weight[0] ** 2 * positions <= cpu.conv.transposed_most:
        return cost
    return Cost(cost.float_us, cost.float_us + cpu.predict_dequantize(None))


def _compute_valid_share(size: int, kernel: int, stride: int) -> float:
    """Share of the taps along one axis that do not fall into the padding."""
    pad_ = (kernel - 1) // 2
    lost = 2 * sum(max(0, pad_ - i * stride) for i in range(min(size, pad_)))
    return 1 - min(lost, size * (kernel - 1)) / (size * kernel)


def _compute_work(
    spatial: Sequence[int], kernel: Sequence[int], strides: Shape, blocks: int, conv: ConvCosts
) -> float:
    """Work of one map, in outputs.

    NCHWc kernels compute rows in tiles of outputs; the rest of a row and its borders are computed singly, with as few
    accumulators as there are blocks. 1x1 kernels run over the whole map as one row.
    """
    if math.prod(kernel) == 1:
        return math.prod(spatial)
    border = min(spatial[1], -(-(kernel[1] - 1) // strides[1]))
    inner = spatial[1] - border
    # NCHWc kernels compute up to four blocks of output channels together.
    single = 1 + min(conv.float_single * (kernel[1] - 1), conv.float_single_most) / min(blocks, 4)
    row = inner - inner % conv.row_tile + single * (inner % conv.row_tile + border)
    return spatial[0] * _compute_valid_share(spatial[0], kernel[0], strides[0]) * row


def _compute_stream_us(weights: float, table: Table) -> float:
    """Microseconds to bring the weights in from memory: those of a large model never stay in the cache."""
    return weights * interpolate(table, weights) / 1e6


def _compute_dense_float_us(
    batch: int,
    spatial: Sequence[int],
    cin: int,
    cout: int,
    kernel: Sequence[int],
    strides: Shape,
    conv: ConvCosts,
) -> float:
    taps = math.prod(kernel)
    pixels = batch * math.prod(spatial)
    weights = cin * cout * taps
    if len(spatial) != 2:
        gmacs = interpolate(conv.line_gmacs, min(cin, cout))
        return pixels * weights / gmacs / 1e3 + _compute_stream_us(weights, conv.stream_float)
    filled = round_up(cout, conv.block)
    work = batch * _compute_work(spatial, kernel, strides, filled // conv.block, conv)
    if cin < conv.block:
        work = work * cin * filled * taps / conv.float_gmacs_nchw
        return (work + pixels * (conv.float_pixel_ns + conv.float_reorder_ns * cin)) / 1e3
    gmacs = interpolate(conv.float_gmacs, filled // conv.block)
    used = math.prod(map(_compute_valid_share, spatial, kernel, strides))
    stream_us = _compute_stream_us(weights * used, conv.stream_float)
    return work * round_up(cin, conv.block) * filled * taps / gmacs / 1e3 + stream_us


def _compute_dense_int8_ns(cin: int, cout: int, taps: int, conv: ConvCosts) -> float:
    """Nanoseconds of one output pixel."""
    macs = round_up(cin * taps, 4) * round_up(cout, INT8_BLOCK) / conv.int8_gmacs
    tap_ns = conv.int8_gather_ns + interpolate(conv.int8_in_tap_ns, cin)
    gather = taps * tap_ns if taps > 1 else 0.0
    small = interpolate(conv.int8_in_ns, cin) + interpolate(conv.int8_out_ns, cout)
    return macs + gather + conv.int8_channel_ns * (cin + cout) + small


def _compute_depthwise_us(
    batch: int, spatial: Sequence[int], channels: int, taps: int, skip: int, cpu: CpuCosts
) -> tuple[float, float]:
    """Microseconds in float and in int8. skip: inputs for each output, the product of the strides."""
    each = cpu.depthwise
    pixels = batch * math.prod(spatial)
    int8_ns = taps * (each.int8_tap_ns + each.int8_ns * channels)
    int8_ns += each.int8_pixel_ns + each.int8_channel_ns * channels
    if channels % INT8_BLOCK:
        odd4_ns = each.odd4_ns if channels % (INT8_BLOCK // 2) else 0.0
        int8_ns += taps * (each.odd_ns * channels + odd4_ns)
    if len(spatial) == 2:
        element_ns = interpolate(each.float_ns, spatial[1]) * (taps / 9) ** each.float_taps
        element_ns += each.float_skip_ns * (skip - 1)
        float_us = pixels * round_up(channels, cpu.conv.block) * element_ns / 1e3
    else:
        float_us = channels * (batch * each.line_group_ns + pixels * taps * each.line_tap_ns) / 1e3
    return float_us, each.int8_launch + pixels * int8_ns / 1e3


def _compute_grouped_us(
    pixels: int, cin: int, cout: int, group: int, taps: int, conv: ConvCosts
) -> tuple[float, float]:
    into = cin // group
    out = cout // group
    # Groups that do not fill NCHWc blocks have a table of their own.
    if into % conv.block or out % conv.block:
        gmacs = interpolate(conv.grouped_float_gmacs, into)
    else:
        gmacs = interpolate(conv.float_gmacs, out // conv.block)
    int8_ns = round_up(into * taps, 4) * round_up(out, INT8_BLOCK) / conv.int8_gmacs
    tap_ns = conv.grouped_int8_tap_ns + conv.grouped_int8_channel_ns * into
    int8_ns += conv.grouped_int8_ns + taps * tap_ns
    weights = into * cout * taps
    float_us = pixels * weights / gmacs / 1e3 + _compute_stream_us(weights, conv.stream_float)
    return float_us, pixels * group * int8_ns / 1e3 + _compute_stream_us(weights, conv.stream_int8)


def read_costs(package: str) -> Mapping[str, CpuCosts]:
    """The tables of a backend by kind of CPU: the data files in `costs` of its package."""
    folder = resources.files(package) / "costs"
    return {
        cpu: parse_costs((folder / f"{cpu}.json").read_text(encoding="utf-8"))
        for cpu in ("vnni", "avx2")
    }
