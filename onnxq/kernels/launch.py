"""Choice of CUDA kernels and grids, by layout and type alone, so that results are bit-identical on every GPU.

call = Call(x=…, y=…, scale=…, qmin=…, qmax=…, flags=…)
plan = backward_plan(layout, DType.F16, parameters=True)
call.partial = scratch of plan.partial_bytes (0: leave it null)
for launch in plan.launches:
    kernel launch.kernel with launch.grid blocks of THREADS threads, argument launch.fill_call(call)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxq.kernels.abi import DType, KernelCall, Layout, make_divisor

# Per block; FQ_THREADS of cuda/fq_kernels.cuh.
THREADS = 256
# 16-byte vectors per thread of the elementwise kernels, as in cuda/fq_kernels.cuh.
_VECTORS = 2
# Elements of a row that one group of threads adds up; a longer row is divided.
_CHUNK = 4096
# Elements. One thread per column adds up rows shorter than _SHORT_ROW, or than _UNEVEN_ROW if they are not whole
# vectors. This makes as many partial sums as columns, which pays off from _MANY_ROWS rows on; otherwise threads go
# along the rows.
_SHORT_ROW = 128
_UNEVEN_ROW = 1024
_MANY_ROWS = 32
# Rows per thread of the column kernels.
_COLUMN_STEPS = 8
# Bytes of a partial result: two sums in double.
_SUMS = 2 * 8


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    # Symbol.
    kernel: str
    # Number of blocks.
    grid: int
    layout: Layout
    dtype: DType
    # Fields of `Call` by name.
    geometry: Mapping[str, int] = field(default_factory=dict)
    # Pieces of a row, or tiles of a strip: the segments of one scale.
    pieces: int = 1

    def fill_call(self, call: KernelCall) -> KernelCall:
        """Copy `call` (pointers, qmin, qmax, flags, gradient scales) and fill in type, shape and geometry."""
        shape = self.layout
        done = KernelCall.from_buffer_copy(call)
        done.dtype = self.dtype
        for name in ("outer", "channels", "inner", "block", "count", "scales"):
            setattr(done, name, getattr(shape, name))
        for name, value in self.geometry.items():
            setattr(done, name, value)
        for name in ("inner", "channels", "block", "blocks"):
            setattr(done, f"by_{name}", make_divisor(max(getattr(shape, name), 1)))
        done.by_pieces = make_divisor(self.pieces)
        return done


@dataclass(frozen=True)
class LaunchPlan:
    """Launches in order."""

    launches: tuple[Launch, ...]
    # Size of the scratch memory that they share: 16-byte aligned, need not be initialised.
    partial_bytes: int = 0


def forward_plan(layout: Layout, dtype: DType) -> LaunchPlan:
    """Plan x -> y; no launch for an empty tensor."""
    return _launch_elementwise("fq_forward", layout, dtype)


def backward_plan(layout: Layout, dtype: DType, *, parameters: bool) -> LaunchPlan:
    """Plan x, dy -> dx and, with `parameters`, dscale and dzero_point (each may still be null in the call).

    For an empty tensor only zeros are written, to dscale and dzero_point.
    """
    if not parameters:
        return _launch_elementwise("fq_dx", layout, dtype)
    if layout.count == 0:
        return LaunchPlan((_launch_finish(layout, dtype, 0, 1),) if layout.scales else ())
    launch = (
        _launch_columns(layout, dtype)
        if _by_columns(layout, dtype)
        else _launch_rows(layout, dtype)
    )
    geometry = launch.geometry
    splits = geometry["partial_outer"]
    inner = geometry["partial_inner"]
    if splits * inner == 1:  # every scale has one sum, which the kernel writes itself
        return LaunchPlan((launch,))
    return LaunchPlan(
        (launch, _launch_finish(layout, dtype, splits, inner)),
        splits * inner * layout.scales * _SUMS,
    )


def _launch_elementwise(kernel: str, layout: Layout, dtype: DType) -> LaunchPlan:
    if layout.count == 0:
        return LaunchPlan(())
    grid = -(-layout.count // (THREADS * _VECTORS * (16 // dtype.size)))
    return LaunchPlan((Launch(f"{kernel}_{dtype.suffix}", grid, layout, dtype),))


def _by_columns(layout: Layout, dtype: DType) -> bool:
    if layout.block:
        return layout.inner > 1
    longest = _SHORT_ROW if layout.inner % (16 // dtype.size) == 0 else _UNEVEN_ROW
    return layout.inner < longest and layout.outer >= _MANY_ROWS


def _launch_rows(layout: Layout, dtype: DType) -> Launch:
    """Launch groups of threads along contiguous runs of one scale: a piece of a long run, or several short runs."""
    pieces = 1
    if layout.block:
        run = min(layout.block, layout.channels)
        runs = 1
        segments = layout.scales
        splits = 1
    elif layout.inner > _CHUNK:
        pieces = -(-layout.inner // _CHUNK)
        run = _CHUNK
        runs = 1
        splits = layout.outer * pieces
        segments = splits * layout.channels
    else:
        run = layout.inner
        runs = min(max(_CHUNK // layout.inner, 1), layout.outer)
        splits = -(-layout.outer // runs)
        segments = splits * layout.channels
    # A thread loads 16 bytes at a time, the most that a GPU loads at once.
    lanes = _round_to_power(-(-run * runs // (16 // dtype.size)), THREADS)
    geometry = {
        "lanes": lanes,
        "segments": segments,
        "run": run,
        "runs": runs,
        "splits": splits,
        "partial_outer": 1,
        "partial_inner": splits,
    }
    grid = -(-segments // (THREADS // lanes))
    return Launch(f"fq_rows_{dtype.suffix}", grid, layout, dtype, geometry, pieces)


def _launch_columns(layout: Layout, dtype: DType) -> Launch:
    """Launch a thread per 16 bytes of columns that goes down the rows of its strip; a tile's threads share the rows."""
    width = layout.inner if layout.block else layout.channels * layout.inner
    vector = 16 // dtype.size
    lanes = _round_to_power(-(-width // vector), 32)
    tiles = -(-width // (lanes * vector))
    if layout.block:
        runs = layout.block
        strips = layout.outer * layout.blocks
        splits = 1
        inner = 1
    else:
        runs = _COLUMN_STEPS * THREADS // lanes
        strips = splits = -(-layout.outer // runs)
        inner = layout.inner
    geometry = {
        "lanes": lanes,
        "segments": strips * tiles,
        "run": width,
        "runs": runs,
        "splits": splits,
        "partial_outer": splits,
        "partial_inner": inner,
    }
    return Launch(f"fq_cols_{dtype.suffix}", strips * tiles, layout, dtype, geometry, tiles)


def _launch_finish(layout: Layout, dtype: DType, outer: int, inner: int) -> Launch:
    """Launch the kernel that adds partial sums.

    Threads of one scale are `THREADS / lanes` apart, so that neighbouring threads read neighbouring scales.
    """
    lanes = 8 if inner == 1 else _round_to_power(inner, THREADS)
    geometry = {"lanes": lanes, "splits": outer, "partial_outer": outer, "partial_inner": inner}
    suffix = DType.F64.suffix if dtype is DType.F64 else DType.F32.suffix
    return Launch(
        f"fq_finish_{suffix}", -(-layout.scales // (THREADS // lanes)), layout, dtype, geometry
    )


def _round_to_power(wanted: int, limit: int) -> int:
    """Return the smallest power of two that is at least `wanted`, at most `limit`."""
    return min(1 << max(wanted - 1, 0).bit_length(), limit)
