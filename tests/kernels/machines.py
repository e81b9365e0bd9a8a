"""Ways to run the kernels on numpy arrays, and what they should give."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from onnxq.kernels import THREADS, DType, Flag, KernelCall, LaunchPlan, Layout, backward_plan, find_layout, forward_plan

NUMPY = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16, DType.F64: np.float64}


@dataclass
class Case:
    """A tensor with its scales, which are shaped as onnxq.spec says and, for blocks, given in memory order."""

    x: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    layout: Layout
    qmin: int
    qmax: int
    flags: int = 0
    dy: np.ndarray | None = None
    grad_scale: float = 1.0
    zero_point_grad_scale: float = 1.0
    threads: int = 1

    @property
    def dtype(self) -> DType:
        return next(code for code, kind in NUMPY.items() if self.x.dtype == kind)

    def call(self, **arrays: np.ndarray | None) -> KernelCall:
        call = KernelCall(
            qmin=self.qmin, qmax=self.qmax, flags=self.flags, dtype=self.dtype, threads=self.threads,
            grad_scale=self.grad_scale, zero_point_grad_scale=self.zero_point_grad_scale,
        )  # fmt: skip
        shape = self.layout
        call.outer, call.channels, call.inner, call.block = shape.outer, shape.channels, shape.inner, shape.block
        inputs = {"x": self.x, "dy": self.dy, "scale": self.scale, "zero_point": self.zero_point}
        for name, array in (inputs | arrays).items():
            setattr(call, name, None if array is None else array.ctypes.data)
        return call


def case(shape, axis, block, dtype, qmin, qmax, seed, *, flags=0, zero_point=True, order=None) -> Case:
    """Values around the levels, exact ties among them, a few far outside; order: dimensions from slow to fast."""
    rng = np.random.default_rng(seed)
    order = tuple(range(len(shape))) if order is None else order
    memory = tuple(shape[dim] for dim in order)
    strides = tuple(np.empty(memory, np.int8).strides[order.index(dim)] for dim in range(len(shape)))
    layout = find_layout(shape, strides, axis, block)
    width = np.float64 if dtype is DType.F64 else np.float32
    scale = (2.0 ** rng.uniform(-6, 1, layout.scales)).astype(width)
    if rng.random() < 0.3:
        scale = (2.0 ** rng.integers(-6, 1, layout.scales)).astype(width)
    if flags & Flag.SCALE_AS_X:
        scale = scale.astype(NUMPY[dtype]).astype(width)
    zero = rng.integers(qmin, qmax + 1, layout.scales).astype(width) if zero_point else None
    middle = 0 if zero is None else expand(zero, layout)
    levels = rng.uniform(qmin - 3, qmax + 3, layout.count).astype(np.float64)
    tie = rng.random(layout.count)
    levels = np.where(tie < 0.3, np.floor(levels) + 0.5, np.where(tie < 0.4, np.rint(levels), levels))
    with np.errstate(over="ignore"):  # float16 ends at 65504: an infinity is a number to clip, too
        x = ((levels - middle) * expand(scale, layout)).astype(NUMPY[dtype])
    dy = rng.standard_normal(layout.count).astype(NUMPY[dtype])
    return Case(x, scale, zero, layout, qmin, qmax, flags, dy, 0.5, 0.25)


def expand(values: np.ndarray, layout: Layout) -> np.ndarray:
    """One value per element, in memory order."""
    shape = (layout.outer, layout.channels, layout.inner)
    if layout.block:
        blocks = values.reshape(layout.outer, layout.blocks, layout.inner)
        return np.repeat(blocks, layout.block, axis=1)[:, : layout.channels].reshape(-1)
    return np.broadcast_to(values.reshape(1, -1, 1), shape).reshape(-1)


def collect(values: np.ndarray, layout: Layout) -> np.ndarray:
    """Sums per scale."""
    full = values.reshape(layout.outer, layout.channels, layout.inner)
    if not layout.block:
        return full.sum(axis=(0, 2))
    starts = np.arange(0, layout.channels, layout.block)
    return np.add.reduceat(full, starts, axis=1).reshape(-1) if full.size else np.zeros(layout.scales)


def expected(one: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """y, dx, dscale, dzero_point by the formulas of cuda/fq_call.h, sums in float64."""
    width = np.float64 if one.dtype is DType.F64 else np.float32
    scale = expand(one.scale, one.layout).astype(width)
    zero = np.zeros_like(scale) if one.zero_point is None else np.rint(expand(one.zero_point, one.layout))
    x, dy = one.x.astype(width), one.dy.astype(width)
    with np.errstate(all="ignore"):
        exact = x / scale
        level = np.rint(exact) + zero
        cut = np.where(level < one.qmin, one.qmin, np.where(level > one.qmax, one.qmax, level))
        y = ((cut - zero) * scale).astype(width)
        if one.flags & Flag.EDGE_CLIP:
            below, above = exact <= one.qmin - zero, exact >= one.qmax - zero
        else:
            below, above = level < one.qmin, level > one.qmax
        outside = below | above
        part = np.where(below, one.qmin - zero, np.where(above, one.qmax - zero, np.rint(exact) - exact))
        dscale = one.grad_scale * collect(dy.astype(np.float64) * part, one.layout)
        dzero = one.zero_point_grad_scale * collect(np.where(outside, -scale * dy.astype(np.float64), 0), one.layout)
    return y.astype(one.x.dtype), np.where(outside, 0, dy).astype(one.x.dtype), dscale, dzero


Machine = Callable[[Case, bool, bool], tuple[np.ndarray | None, ...]]


def on_cpu(library: ctypes.CDLL) -> Machine:
    """run(case, dx, parameters) -> y, dx, dscale, dzero_point."""

    def run(one: Case, dx: bool = True, parameters: bool = True) -> tuple[np.ndarray | None, ...]:
        y = np.full_like(one.x, 99)
        assert library.fq_cpu_forward(ctypes.byref(one.call(y=y))) == 0
        gradients = outputs(one, dx, parameters)
        names = dict(zip(("y", "dscale", "dzero_point"), gradients, strict=True))
        assert library.fq_cpu_backward(ctypes.byref(one.call(**names))) == 0
        return y, *gradients

    return run


def outputs(one: Case, dx: bool, parameters: bool) -> tuple[np.ndarray | None, ...]:
    sums = [np.full_like(one.scale, 99) if parameters else None for _ in range(2)]
    return (np.full_like(one.x, 99) if dx else None), *sums


def start(library: ctypes.CDLL, plan: LaunchPlan, call: KernelCall, first: int = 0) -> None:
    """All launches of a plan under the emulation; first: the block to begin with."""
    library.fq_emu_launch_from.restype = ctypes.c_char_p
    # NaN where nothing was written; one value beyond either end is watched.
    scratch = np.full(plan.partial_bytes // 8 + 4, np.nan)
    inside = 2 - scratch.ctypes.data // 8 % 2
    call.partial = scratch[inside:].ctypes.data if plan.partial_bytes else None
    for launch in plan.launches:
        filled = launch.fill_call(call)
        name, grid = launch.kernel.encode(), launch.grid
        said = library.fq_emu_launch_from(name, min(first, grid), grid, THREADS, ctypes.byref(filled))
        assert said == b"", said
    assert np.isnan(scratch[:inside]).all()
    assert np.isnan(scratch[inside + plan.partial_bytes // 8 :]).all()


def on_grid(library: ctypes.CDLL) -> Machine:
    """The CUDA kernels under their emulation, launched as plans say."""

    def run(one: Case, dx: bool = True, parameters: bool = True) -> tuple[np.ndarray | None, ...]:
        y = np.full_like(one.x, 99)
        start(library, forward_plan(one.layout, one.dtype), one.call(y=y))
        gradients = outputs(one, dx, parameters)
        names = dict(zip(("y", "dscale", "dzero_point"), gradients, strict=True))
        start(library, backward_plan(one.layout, one.dtype, parameters=parameters), one.call(**names))
        return y, *gradients

    return run
