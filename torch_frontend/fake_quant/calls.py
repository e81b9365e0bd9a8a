"""Calls of compiled kernels: their arguments and outputs, run on the CPU at once, on a GPU by launches of a plan."""

import ctypes
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from onnxq.kernels import DType, Flag, KernelCall, Layout, backward_plan, find_layout, forward_plan
from torch_frontend.fake_quant.grid import Gradients, Grid, Needed, TensorPair

_CODES = {
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float64: DType.F64,
}
# 4096 layouts: more than the tensors of one model have; a miss only computes one again.
_cached_layout = lru_cache(maxsize=4096)(find_layout)
# Bytes. Larger outputs are put into huge pages: glibc's allocator takes them fresh from the system every time.
# Smaller blocks it keeps and gives out again without page faults; advice on parts of its heap would only split it.
_LARGE = 32 << 20
# Bytes of a page on x86-64 and most arm64; madvise takes addresses that are multiples of it.
_PAGE = 4096
# <sys/mman.h> of Linux.
_MADV_HUGEPAGE = 14


@dataclass(slots=True)
class Prepared:
    """A call whose pointers are set, its layout, its outputs, and the tensors that must outlive the call."""

    call: KernelCall
    layout: Layout
    outputs: list[Tensor | None]
    # The call holds bare addresses; these references keep their memory alive until the kernels are queued.
    held: tuple[Tensor, ...]
    backward: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.held[0].device


def prepare_forward(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Prepared:
    """The call of forward. outputs: [y], with the strides of `torch.empty_like(x)`."""
    x, layout = _make_dense(x, grid)
    call, qparams = _start_call(x, scale, zero_point, grid, layout)
    y = _allocate_like(x)
    call.y = y.data_ptr()
    return Prepared(call, layout, [y], (x, *qparams))


def prepare_backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, needed: Needed
) -> Prepared:
    """The call of backward. outputs: [dx, dscale, dzero_point], None where not needed; see `restore_gradients`."""
    x, layout = _make_dense(x, grid)
    # One layout describes x, dy and dx, so all must share strides and type.
    if dy.stride() != x.stride() or dy.dtype != x.dtype:
        dy = torch.empty_like(x).copy_(dy)
    call, qparams = _start_call(x, scale, zero_point, grid, layout)
    call.dy = dy.data_ptr()
    dx = _allocate_like(x) if needed[0] else None
    dscale, dzero = (torch.empty_like(qparams[0]) if need else None for need in needed[1:])
    call.y, call.dscale, call.dzero_point = (
        None if t is None else t.data_ptr() for t in (dx, dscale, dzero)
    )
    call.grad_scale = grid.grad_scale
    call.zero_point_grad_scale = grid.zero_point_grad_scale
    if grid.edge == "clip":
        call.flags |= Flag.EDGE_CLIP
    return Prepared(call, layout, [dx, dscale, dzero], (x, dy, *qparams), backward=True)


def restore_gradients(prepared: Prepared, like: TensorPair, grid: Grid) -> Gradients:
    """(dx, dscale, dzero_point) of a finished call, the last two in the layout and dtype of `like`."""
    dx, *sums = prepared.outputs
    restored = [
        None if t is None else _restore_sum(t, parameter, prepared.layout, grid)
        for t, parameter in zip(sums, like, strict=True)
    ]
    return dx, *restored


def _make_dense(x: Tensor, grid: Grid) -> tuple[Tensor, Layout]:
    """x and its layout; a dense copy of x if its strides leave gaps or overlap."""
    layout = _cached_layout(x.shape, x.stride(), grid.axis, grid.block_size)
    if layout is None:
        x = torch.empty_like(x).copy_(x)
        layout = _cached_layout(x.shape, x.stride(), grid.axis, grid.block_size)
        assert layout is not None, "empty_like makes dense tensors"
    return x, layout


def _start_call(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, layout: Layout
) -> tuple[KernelCall, TensorPair]:
    """A Call without outputs, and (scale, zero_point) in the kernels' type and order."""
    width = torch.promote_types(x.dtype, torch.float32)
    # Kernels walk dimensions in memory order; blocked scales have x's rank and must follow it.
    order = layout.order if grid.block_size else None
    qparams = _convert_qparam(scale, width, order), _convert_qparam(zero_point, width, order)
    call = KernelCall(
        x=x.data_ptr(),
        scale=qparams[0].data_ptr(),
        zero_point=qparams[1].data_ptr(),
        outer=layout.outer,
        channels=layout.channels,
        inner=layout.inner,
        block=layout.block,
        qmin=grid.qmin,
        qmax=grid.qmax,
        dtype=_CODES[x.dtype],
        # ONNX stores the scale of float16 tensors as float16; bfloat16 keeps a float32 scale.
        flags=Flag.SCALE_AS_X if x.dtype == torch.float16 else 0,
    )
    return call, qparams


def _convert_qparam(values: Tensor, width: torch.dtype, order: tuple[int, ...] | None) -> Tensor:
    values = values.to(width)
    return (values if order is None else values.permute(order)).contiguous()


def _restore_sum(sums: Tensor, like: Tensor, layout: Layout, grid: Grid) -> Tensor:
    if grid.block_size:
        # The inverse permutation of layout.order.
        sums = sums.permute(
            sorted(range(len(layout.order)), key=layout.order.__getitem__)
        ).contiguous()
    return sums.to(like.dtype)


def _allocate_like(x: Tensor) -> Tensor:
    """Uninitialized memory like x, in huge pages where it is large.

    The first touch of a fresh page is a fault: one for 2 MiB instead of 4 KiB. With small pages the faults of a large
    output take several times as long as the kernel.
    """
    y = torch.empty_like(x)
    size = y.numel() * y.element_size()
    if size >= _LARGE and y.device.type == "cpu":
        advise = _load_madvise()
        if advise is not None:
            # First whole page; its neighbours may belong to others.
            start = -(-y.data_ptr() // _PAGE) * _PAGE
            advise(start, (y.data_ptr() + size - start) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return y


@cache
def _load_madvise() -> Any:
    """madvise(2) on Linux, else None. Its result is ignored: it is a hint."""
    if not sys.platform.startswith("linux"):
        return None
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


class CompiledKernels(ABC):
    """Forward and backward by compiled kernels; a subclass runs a prepared call on its device."""

    @abstractmethod
    def run_call(self, prepared: Prepared) -> None:
        """Fill the outputs that the call has."""

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
        """Return y, with the strides of `torch.empty_like(x)`."""
        prepared = prepare_forward(x, scale, zero_point, grid)
        self.run_call(prepared)
        return prepared.outputs[0]  # type: ignore[assignment]

    def backward(
        self, dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, needed: Needed
    ) -> Gradients:
        """Return (dx, dscale, dzero_point), None where not needed."""
        prepared = prepare_backward(dy, x, scale, zero_point, grid, needed)
        self.run_call(prepared)
        return restore_gradients(prepared, (scale, zero_point), grid)


class HostKernels(CompiledKernels):
    """Kernels of the library from `onnxq.kernels.load_host`, on as many threads as torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forward = library.fq_cpu_forward
        self._backward = library.fq_cpu_backward

    def run_call(self, prepared: Prepared) -> None:
        """Fill the outputs."""
        # Read at every call: the user may change it with torch.set_num_threads.
        prepared.call.threads = torch.get_num_threads()
        # The kernels' only failure: std::bad_alloc must not cross the C interface.
        if (self._backward if prepared.backward else self._forward)(prepared.call):
            raise MemoryError("fake_quantize: no memory for partial sums")


# (kernel, blocks, call with its geometry filled in)
_Launches = tuple[tuple[str, int, KernelCall], ...]
# Fields that differ from call to call; the geometry depends on the layout alone and is cached.
_POINTERS = ("x", "dy", "y", "scale", "zero_point", "dscale", "dzero_point", "partial")
_GIVEN = (*_POINTERS, "grad_scale", "zero_point_grad_scale", "qmin", "qmax", "flags")


class PlannedKernels(CompiledKernels):
    """Kernels run by the plans of `onnxq.kernels.launch`."""

    @abstractmethod
    def launch_kernel(self, kernel: str, grid: int, call: KernelCall, device: torch.device) -> None:
        """Launch `kernel` with `grid` blocks, behind all earlier launches."""

    def run_call(self, prepared: Prepared) -> None:
        """Fill the outputs."""
        parameters = (
            any(output is not None for output in prepared.outputs[1:])
            if prepared.backward
            else None
        )
        launches, scratch = _plan_launches(prepared.layout, DType(prepared.call.dtype), parameters)
        if scratch:
            # Freed when this returns, before the kernels have run: torch's allocator gives the memory only to work that
            # is queued behind them on the same stream.
            partial = torch.empty(scratch // 8, dtype=torch.float64, device=prepared.device)
            prepared.call.partial = partial.data_ptr()
        for kernel, grid, geometry in launches:
            call = KernelCall.from_buffer_copy(geometry)
            for name in _GIVEN:
                setattr(call, name, getattr(prepared.call, name))
            self.launch_kernel(kernel, grid, call, prepared.device)


@lru_cache(maxsize=4096)
def _plan_launches(layout: Layout, dtype: DType, parameters: bool | None) -> tuple[_Launches, int]:
    """(launches, bytes of scratch memory) of forward (parameters None) or of backward.

    parameters: whether backward computes dscale or dzero_point.
    """
    plan = (
        forward_plan(layout, dtype)
        if parameters is None
        else backward_plan(layout, dtype, parameters=parameters)
    )
    return tuple(
        (launch.kernel, launch.grid, launch.fill_call(KernelCall())) for launch in plan.launches
    ), plan.partial_bytes
