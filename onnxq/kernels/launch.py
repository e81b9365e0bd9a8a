"""Which CUDA kernels run, on which grid: decided by layout and type alone, so results are the same bits on every GPU.

call = Call(x=…, y=…, scale=…, qmin=…, qmax=…, flags=…)
plan = backward_plan(layout, DType.F16, parameters=True)
call.partial = scratch of plan.partial_bytes (0: leave it null)
for launch in plan.launches:
    kernel launch.kernel with launch.grid blocks of THREADS threads, argument launch.fill(call)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxq.kernels.abi import Call, Divisor, DType
from onnxq.kernels.layout import Layout

THREADS = 256
# As in cuda/fq_kernels.cuh: 16-byte vectors that one thread of the elementwise kernels handles.
_VECTORS = 2
# Elements of a row that one group of threads adds up; a longer row is cut into pieces.
_CHUNK = 4096
# A thread per column adds up short rows, or rows that are not whole vectors, if there are rows enough to hide that
# its partial sums are as many as the columns; else threads go along the rows.
_SHORT_ROW, _UNEVEN_ROW = 128, 1024
_MANY_ROWS = 32
_COLUMN_STEPS = 8
_SUMS = 2 * 8


@dataclass(frozen=True)
class Launch:
    """One kernel: its symbol, the number of blocks, and the geometry that its argument needs."""

    kernel: str
    grid: int
    layout: Layout
    dtype: DType
    geometry: Mapping[str, int] = field(default_factory=dict)
    pieces: int = 1

    def fill(self, call: Call) -> Call:
        """A copy of `call` (pointers, levels, flags, gradient scales) with type, shape and geometry filled in."""
        shape = self.layout
        done = Call.from_buffer_copy(call)
        done.dtype = self.dtype
        done.outer, done.channels, done.inner, done.block = shape.outer, shape.channels, shape.inner, shape.block
        done.count, done.scales = shape.count, shape.scales
        for name, value in self.geometry.items():
            setattr(done, name, value)
        done.by_inner = Divisor.of(max(shape.inner, 1))
        done.by_channels = Divisor.of(max(shape.channels, 1))
        done.by_block = Divisor.of(max(shape.block, 1))
        done.by_blocks = Divisor.of(max(shape.blocks, 1))
        done.by_pieces = Divisor.of(self.pieces)
        return done


@dataclass(frozen=True)
class Plan:
    """Launches in order, and the scratch memory they share (16-byte aligned; contents do not matter)."""

    launches: tuple[Launch, ...]
    partial_bytes: int = 0


def forward_plan(layout: Layout, dtype: DType) -> Plan:
    """x -> y; nothing to launch for an empty tensor."""
    return _elementwise("fq_forward", layout, dtype)


def backward_plan(layout: Layout, dtype: DType, *, parameters: bool) -> Plan:
    """x, dy -> dx and, with `parameters`, dscale and dzero_point (each may still be null in the call).

    For an empty tensor only zeros are written, to dscale and dzero_point.
    """
    if not parameters:
        return _elementwise("fq_dx", layout, dtype)
    if layout.count == 0:
        return Plan((_finish(layout, dtype, 0, 1),) if layout.scales else ())
    launch = _cols(layout, dtype) if _by_columns(layout, dtype) else _rows(layout, dtype)
    geometry = launch.geometry
    splits, inner = geometry["partial_outer"], geometry["partial_inner"]
    if splits * inner == 1:
        return Plan((launch,))
    return Plan((launch, _finish(layout, dtype, splits, inner)), splits * inner * layout.scales * _SUMS)


def _elementwise(kernel: str, layout: Layout, dtype: DType) -> Plan:
    if layout.count == 0:
        return Plan(())
    grid = -(-layout.count // (THREADS * _VECTORS * (16 // dtype.size)))
    return Plan((Launch(f"{kernel}_{dtype.suffix}", grid, layout, dtype),))


def _by_columns(layout: Layout, dtype: DType) -> bool:
    if layout.block:
        return layout.inner > 1
    longest = _SHORT_ROW if layout.inner % (16 // dtype.size) == 0 else _UNEVEN_ROW
    return layout.inner < longest and layout.outer >= _MANY_ROWS


def _rows(layout: Layout, dtype: DType) -> Launch:
    """Groups of threads along contiguous runs of one scale: a piece of a long run, or several short runs."""
    pieces = 1
    if layout.block:
        run, runs, segments, splits = min(layout.block, layout.channels), 1, layout.scales, 1
    elif layout.inner > _CHUNK:
        pieces = -(-layout.inner // _CHUNK)
        run, runs = _CHUNK, 1
        splits = layout.outer * pieces
        segments = splits * layout.channels
    else:
        run, runs = layout.inner, min(max(_CHUNK // layout.inner, 1), layout.outer)
        splits = -(-layout.outer // runs)
        segments = splits * layout.channels
    lanes = _power(-(-run * runs // (16 // dtype.size)), THREADS)
    geometry = {
        "lanes": lanes, "segments": segments, "run": run, "runs": runs, "splits": splits,
        "partial_outer": 1, "partial_inner": splits,
    }  # fmt: skip
    grid = -(-segments // (THREADS // lanes))
    return Launch(f"fq_rows_{dtype.suffix}", grid, layout, dtype, geometry, pieces)


def _cols(layout: Layout, dtype: DType) -> Launch:
    """A thread per 16 bytes of columns, going down the rows of its strip; threads of a tile share the strip's rows."""
    width = layout.inner if layout.block else layout.channels * layout.inner
    vector = 16 // dtype.size
    lanes = _power(-(-width // vector), 32)
    tiles = -(-width // (lanes * vector))
    if layout.block:
        runs, strips, splits, inner = layout.block, layout.outer * layout.blocks, 1, 1
    else:
        runs = _COLUMN_STEPS * THREADS // lanes
        strips = splits = -(-layout.outer // runs)
        inner = layout.inner
    geometry = {
        "lanes": lanes, "segments": strips * tiles, "run": width, "runs": runs, "splits": splits,
        "partial_outer": splits, "partial_inner": inner,
    }  # fmt: skip
    return Launch(f"fq_cols_{dtype.suffix}", strips * tiles, layout, dtype, geometry, tiles)


def _finish(layout: Layout, dtype: DType, outer: int, inner: int) -> Launch:
    """Threads that share a scale stand `THREADS / lanes` apart, so that neighbours read neighbouring scales."""
    lanes = 8 if inner == 1 else _power(inner, THREADS)
    geometry = {"lanes": lanes, "splits": outer, "partial_outer": outer, "partial_inner": inner}
    suffix = DType.F64.suffix if dtype is DType.F64 else DType.F32.suffix
    return Launch(f"fq_finish_{suffix}", -(-layout.scales // (THREADS // lanes)), layout, dtype, geometry)


def _power(wanted: int, limit: int) -> int:
    """Smallest power of two that is at least `wanted`, at most `limit`."""
    return min(1 << max(wanted - 1, 0).bit_length(), limit)
