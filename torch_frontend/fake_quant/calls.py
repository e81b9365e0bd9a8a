"""From tensors to the one argument that every compiled kernel takes, and outputs for it to fill."""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from onnxq.kernels import Call, DType, Flag, Layout, layout_of
from torch_frontend.fake_quant.grid import Grid, Needed

_CODES = {
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float64: DType.F64,
}
_layout = lru_cache(maxsize=4096)(layout_of)
# Outputs from here on are asked to live in huge pages: glibc's allocator takes them fresh from the system every time.
# What is smaller it keeps and gives out again, without any fault; advice on parts of its heap would only cut that up.
_LARGE = 32 << 20
_PAGE = 4096
_MADV_HUGEPAGE = 14


@dataclass(slots=True)
class Prepared:
    """A call whose pointers are set, and the tensors behind them, alive as long as this is."""

    call: Call
    layout: Layout
    outputs: list[Tensor | None]
    held: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.held[0].device


def prepare_forward(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Prepared:
    """outputs: [y], with the strides `torch.empty_like(x)` gives."""
    x, layout = _dense(x, grid)
    call, numbers = _shared(x, scale, zero_point, grid, layout)
    y = _empty_like(x)
    call.y = y.data_ptr()
    return Prepared(call, layout, [y], (x, *numbers))


def prepare_backward(dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, needed: Needed) -> Prepared:
    """outputs: dx, dscale, dzero_point; None where not needed. The two sums are as `finish` takes them."""
    x, layout = _dense(x, grid)
    if dy.stride() != x.stride() or dy.dtype != x.dtype:
        dy = torch.empty_like(x).copy_(dy)
    call, numbers = _shared(x, scale, zero_point, grid, layout)
    call.dy = dy.data_ptr()
    dx = _empty_like(x) if needed[0] else None
    dscale, dzero = (torch.empty_like(numbers[0]) if need else None for need in needed[1:])
    call.y, call.dscale, call.dzero_point = (None if t is None else t.data_ptr() for t in (dx, dscale, dzero))
    call.grad_scale, call.zero_point_grad_scale = grid.grad_scale, grid.zero_point_grad_scale
    if grid.edge == "clip":
        call.flags |= Flag.EDGE_CLIP
    return Prepared(call, layout, [dx, dscale, dzero], (x, dy, *numbers))


def finish(prepared: Prepared, like: tuple[Tensor, Tensor], grid: Grid) -> tuple[Tensor | None, ...]:
    """dx, dscale, dzero_point, the last two as `like` is laid out and typed."""
    dx, *sums = prepared.outputs
    restored = [
        None if t is None else _restored(t, one, prepared.layout, grid) for t, one in zip(sums, like, strict=True)
    ]
    return dx, *restored


def _dense(x: Tensor, grid: Grid) -> tuple[Tensor, Layout]:
    layout = _layout(x.shape, x.stride(), grid.axis, grid.block_size)
    if layout is None:
        x = torch.empty_like(x).copy_(x)
        layout = _layout(x.shape, x.stride(), grid.axis, grid.block_size)
        assert layout is not None, "empty_like makes dense tensors"
    return x, layout


def _shared(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, layout: Layout
) -> tuple[Call, tuple[Tensor, Tensor]]:
    width = torch.float64 if x.dtype == torch.float64 else torch.float32
    order = layout.order if grid.block_size else None
    numbers = _as_kernels_read(scale, width, order), _as_kernels_read(zero_point, width, order)
    call = Call()
    call.x, call.scale, call.zero_point = x.data_ptr(), numbers[0].data_ptr(), numbers[1].data_ptr()
    call.outer, call.channels, call.inner, call.block = layout.outer, layout.channels, layout.inner, layout.block
    call.qmin, call.qmax, call.dtype = grid.qmin, grid.qmax, _CODES[x.dtype]
    call.flags = Flag.SCALE_AS_X if x.dtype == torch.float16 else 0
    return call, numbers


def _as_kernels_read(values: Tensor, width: torch.dtype, order: tuple[int, ...] | None) -> Tensor:
    if values.dtype is not width:
        values = values.to(width)
    if order is not None:
        values = values.permute(order)
    return values if values.is_contiguous() else values.contiguous()


def _restored(sums: Tensor, like: Tensor, layout: Layout, grid: Grid) -> Tensor:
    if grid.block_size:
        sums = sums.permute(sorted(range(len(layout.order)), key=layout.order.__getitem__)).contiguous()
    return sums if sums.dtype is like.dtype else sums.to(like.dtype)


def _empty_like(x: Tensor) -> Tensor:
    """Uninitialized memory. A large output comes fresh from the system: in huge pages its first touch is a fault
    for 2 MiB instead of 4 KiB, which otherwise takes several times as long as the kernel."""
    y = torch.empty_like(x)
    size = y.numel() * y.element_size()
    if size >= _LARGE and y.device.type == "cpu":
        advise = _madvise()
        if advise is not None:
            start = -(-y.data_ptr() // _PAGE) * _PAGE
            advise(start, (y.data_ptr() + size - start) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return y


@cache
def _madvise() -> Any:
    """madvise(2) on Linux; a hint, so its result is of no interest."""
    if not sys.platform.startswith("linux"):
        return None
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


class CompiledKernels(ABC):
    """Kernels that fill what was prepared; a device says how they are run."""

    @abstractmethod
    def run_forward(self, prepared: Prepared) -> None:
        """Fill y."""

    @abstractmethod
    def run_backward(self, prepared: Prepared) -> None:
        """Fill dx, dscale and dzero_point, those that have an output."""

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
        """y, with the strides of `torch.empty_like(x)`."""
        prepared = prepare_forward(x, scale, zero_point, grid)
        self.run_forward(prepared)
        y: Tensor = prepared.outputs[0]  # type: ignore[assignment]
        return y

    def backward(
        self, dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, needed: Needed
    ) -> tuple[Tensor | None, ...]:
        """dx, dscale, dzero_point; None where not needed."""
        prepared = prepare_backward(dy, x, scale, zero_point, grid, needed)
        self.run_backward(prepared)
        return finish(prepared, (scale, zero_point), grid)
