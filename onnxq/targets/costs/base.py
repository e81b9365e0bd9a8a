"""What the cost model is asked, what it answers, and the constants that a kind of CPU gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]
# A value by size, linear in the logarithm of the size between the entries.
Table = Mapping[int, float]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class PairCosts:
    """QuantizeLinear and DequantizeLinear: microseconds to launch, nanoseconds an element.

    from_conv: more behind a float Conv (ReorderOutput and Transpose); to_conv: more in front of one (Transpose, the
    guarding Clip and ReorderInput).
    """

    q_launch: float
    q_ns: float
    dq_launch: float
    dq_ns: float
    from_conv_launch: float
    from_conv_ns: float
    to_conv_launch: float
    to_conv_ns: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvCosts:
    """Dense and grouped Conv. `_gmacs` are multiplications a nanosecond, `_ns` nanoseconds, `_launch` microseconds.

    block: channels of one NCHWc block of the float kernels; row_tile: outputs of a row that they do at once.
    cold_ns: operands that other nodes have pushed out of the nearest cache, which chains of equal Convs do not show.
    clip_ns: NCHWc kernels do Relu on the way out, Clip in a second pass; int8 ones need neither.
    float_gmacs: by blocks of output channels; float_gmacs_nchw: inputs of less than a block are read as they are.
    float_single: a single output of a row costs 1 + this * (kernel - 1) / blocks, the addend at most float_single_most.
    float_reorder_ns: an output that a Conv of less than a block will read goes back to NCHW.
    stream_float, stream_int8: microseconds a million weights to bring them in, by their number.
    int8_image_ns: a map of 2 to 4 channels is the model's input: it comes in NCHW and is transposed.
    int8_in_ns, int8_in_tap_ns, int8_out_ns: of one output pixel, by channels.
    line_gmacs: float Conv of one or three dimensions, by the smaller number of channels.
    grouped_float_gmacs: by input channels of a group.
    """

    block: int
    row_tile: int
    launch: float
    int8_launch: float
    cold_ns: float
    int8_cold_ns: float
    clip_ns: float
    float_gmacs: Table
    float_gmacs_nchw: float
    float_single: float
    float_single_most: float
    float_pixel_ns: float
    float_reorder_ns: float
    stream_float: Table
    stream_int8: Table
    int8_gmacs: float
    int8_image_ns: float
    int8_channel_ns: float
    int8_gather_ns: float
    int8_in_ns: Table
    int8_in_tap_ns: Table
    int8_out_ns: Table
    line_gmacs: Table
    grouped_float_gmacs: Table
    grouped_int8_ns: float
    grouped_int8_tap_ns: float
    grouped_int8_channel_ns: float


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthwiseCosts:
    """Conv of one input and one output channel a group.

    float_ns: by the width of the map; float_taps: time grows with (taps/9) to this power; float_skip_ns: of an input
    that stride leaves without an output. odd_ns, odd4_ns: a channel count that fills no vector of 16, of 8.
    line: Conv of one or three dimensions, which is done group by group.
    """

    float_ns: Table
    float_taps: float
    float_skip_ns: float
    int8_launch: float
    int8_tap_ns: float
    int8_ns: float
    int8_pixel_ns: float
    int8_channel_ns: float
    odd_ns: float
    odd4_ns: float
    line_group_ns: float
    line_tap_ns: float


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearCosts:
    """Gemm and MatMul. one_row_gmacs: what a single row reaches. matmul_bias: the Add that a float Gemm does not need.

    stream: microseconds a million weights, by their number; one row hides most of it.
    """

    launch: float
    int8_launch: float
    gmacs: float
    int8_gmacs: float
    one_row_gmacs: float
    int8_one_row_gmacs: float
    row_ns: float
    out_ns: float
    int8_row_ns: float
    int8_out_ns: float
    int8_in_ns: float
    matmul_bias_launch: float
    matmul_bias_ns: float
    matmul_int8_bias_launch: float
    matmul_int8_bias_ns: float
    stream_float: Table
    stream_int8: Table


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuCosts:
    """The constants of one kind of CPU. origin: the machine, version and day they were measured on and with.

    int8_network: what products in integers take in whole networks over what chains of equal nodes show, beyond what
    float ones do.
    elements: by operator; besides the names of operators "residual" (an Add that a Conv in front of it takes in, the
    usual case on maps), "gate" (a Mul of a map by one value a channel) and "unknown" (without the pair around it).
    """

    name: str
    origin: str
    int8_network: float
    pairs: PairCosts
    conv: ConvCosts
    depthwise: DepthwiseCosts
    linear: LinearCosts
    elements: Mapping[str, Moves]


def pad(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def interpolate(table: Table, x: float) -> float:
    """Piecewise linear in log(x), constant beyond both ends."""
    points = sorted(table)
    if x <= points[0]:
        return table[points[0]]
    for low, high in pairwise(points):
        if x <= high:
            t = math.log(x / low) / math.log(high / low)
            return table[low] + t * (table[high] - table[low])
    return table[points[-1]]
