"""The constants that each kind of CPU gives the cost model.

Units, by the end of a name: `_us` and `_launch` microseconds, `_ns` nanoseconds per element, `_gmacs` multiplications
per nanosecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

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


def round_up(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def interpolate(table: Table, x: float) -> float:
    """The table at x: piecewise linear in log(x), constant beyond both ends."""
    points = sorted(table)
    if x <= points[0]:
        return table[points[0]]
    for low, high in pairwise(points):
        if x <= high:
            t = math.log(x / low) / math.log(high / low)
            return table[low] + t * (table[high] - table[low])
    return table[points[-1]]
