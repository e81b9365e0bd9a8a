"""Time of a Conv, float and int8.

Float Convs run in NCHWc (channels padded to whole blocks), int8 ones in NHWC: changing from one to the other is part of
the pairs' costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxq.arrays import Shape
from onnxq.backends.costs import Cost, OpCase
from onnxq.backends.ort.costs.base import ConvCosts, CpuCosts, DepthwiseCosts, Table, interpolate, round_up

# Channels that the int8 kernels compute at once, on all kinds of x86.
INT8_BLOCK = 16


def conv_cost(case: OpCase, weight: Shape, cpu: CpuCosts) -> Cost:
    """Time of a Conv with a constant weight."""
    conv = cpu.conv
    cout, per_group, *kernel = weight
    # An unknown size is taken for a small map.
    spatial = case.output[2:] if case.output is not None else (7,) * len(kernel)
    batch = case.output[0] if case.output is not None else 1
    cin = per_group * case.group
    strides = case.strides or (1,) * len(kernel)
    if case.group == 1:
        float_us = _compute_dense_float_us(batch, spatial, cin, cout, kernel, strides, conv)
        int8_us = batch * math.prod(spatial) * _compute_dense_int8_ns(cin, cout, math.prod(kernel), conv) / 1e3
        int8_us += _compute_stream_us(cin * cout * math.prod(kernel), conv.stream_int8)
    elif per_group == 1 and cin == cout:
        float_us, int8_us = _compute_depthwise_us(batch, spatial, cin, math.prod(kernel), math.prod(strides), cpu)
    else:
        float_us, int8_us = _compute_grouped_us(
            batch * math.prod(spatial), cin, cout, case.group, math.prod(kernel), conv
        )
    written = batch * cout * math.prod(spatial)
    read = written * cin * math.prod(strides) // cout
    image = conv.int8_image_ns * read if 1 < cin <= 4 else 0.0
    clip = conv.clip_ns * written if case.activation == "Clip" else 0.0
    return Cost(
        conv.launch + float_us + (conv.cold_ns * (read + written) + clip) / 1e3,
        conv.int8_launch + int8_us + (conv.int8_cold_ns * (read + written) + image) / 1e3,
    )


def _compute_valid_share(size: int, kernel: int, stride: int) -> float:
    """Share of the taps along one axis that do not fall into the padding."""
    pad_ = (kernel - 1) // 2
    lost = 2 * sum(max(0, pad_ - i * stride) for i in range(min(size, pad_)))
    return 1 - min(lost, size * (kernel - 1)) / (size * kernel)


def _compute_work(spatial: Shape, kernel: Sequence[int], strides: Shape, blocks: int, conv: ConvCosts) -> float:
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
    batch: int, spatial: Shape, cin: int, cout: int, kernel: Sequence[int], strides: Shape, conv: ConvCosts
) -> float:
    taps, pixels = math.prod(kernel), batch * math.prod(spatial)
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
    used = _compute_valid_share(spatial[0], kernel[0], strides[0]) * _compute_valid_share(
        spatial[1], kernel[1], strides[1]
    )
    return work * round_up(cin, conv.block) * filled * taps / gmacs / 1e3 + _compute_stream_us(
        weights * used, conv.stream_float
    )


def _compute_dense_int8_ns(cin: int, cout: int, taps: int, conv: ConvCosts) -> float:
    """Nanoseconds of one output pixel."""
    macs = round_up(cin * taps, 4) * round_up(cout, INT8_BLOCK) / conv.int8_gmacs
    gather = taps * (conv.int8_gather_ns + interpolate(conv.int8_in_tap_ns, cin)) if taps > 1 else 0.0
    small = interpolate(conv.int8_in_ns, cin) + interpolate(conv.int8_out_ns, cout)
    return macs + gather + conv.int8_channel_ns * (cin + cout) + small


def _compute_depthwise_us(
    batch: int, spatial: Shape, channels: int, taps: int, skip: int, cpu: CpuCosts
) -> tuple[float, float]:
    """Microseconds in float and in int8. skip: inputs for each output, the product of the strides."""
    each: DepthwiseCosts = cpu.depthwise
    pixels = batch * math.prod(spatial)
    int8_ns = taps * (each.int8_tap_ns + each.int8_ns * channels)
    int8_ns += each.int8_pixel_ns + each.int8_channel_ns * channels
    if channels % INT8_BLOCK:
        int8_ns += taps * (each.odd_ns * channels + (each.odd4_ns if channels % (INT8_BLOCK // 2) else 0.0))
    if len(spatial) == 2:
        element = interpolate(each.float_ns, spatial[1]) * (taps / 9) ** each.float_taps
        float_us = pixels * round_up(channels, cpu.conv.block) * (element + each.float_skip_ns * (skip - 1)) / 1e3
    else:
        float_us = channels * (batch * each.line_group_ns + pixels * taps * each.line_tap_ns) / 1e3
    return float_us, each.int8_launch + pixels * int8_ns / 1e3


def _compute_grouped_us(
    pixels: int, cin: int, cout: int, group: int, taps: int, conv: ConvCosts
) -> tuple[float, float]:
    into, out = cin // group, cout // group
    # Groups that do not fill NCHWc blocks have a table of their own.
    if into % conv.block or out % conv.block:
        gmacs = interpolate(conv.grouped_float_gmacs, into)
    else:
        gmacs = interpolate(conv.float_gmacs, out // conv.block)
    int8_ns = round_up(into * taps, 4) * round_up(out, INT8_BLOCK) / conv.int8_gmacs
    int8_ns += conv.grouped_int8_ns + taps * (conv.grouped_int8_tap_ns + conv.grouped_int8_channel_ns * into)
    weights = into * cout * taps
    float_us = pixels * weights / gmacs / 1e3 + _compute_stream_us(weights, conv.stream_float)
    return float_us, pixels * group * int8_ns / 1e3 + _compute_stream_us(weights, conv.stream_int8)
