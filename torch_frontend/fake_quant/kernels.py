"""Which implementation each device type gets in this process, found out when its first tensor arrives."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from torch_frontend.fake_quant import reference
from torch_frontend.fake_quant.grid import Grid, Needed


class SlowFakeQuantWarning(UserWarning):
    """There is no compiled kernel; composed torch operators run, with the same numbers."""


class Kernels(Protocol):
    """Forward and backward on tensors that were checked; `torch_frontend.fake_quant.reference` says what they are."""

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
        """y, with the strides of `torch.empty_like(x)`."""

    def backward(
        self, dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, needed: Needed
    ) -> tuple[Tensor | None, ...]:
        """dx, dscale, dzero_point; None where not needed."""


class ReferenceKernels:
    """Composed torch operators, and why nothing better runs."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.forward = reference.forward
        self.backward = reference.backward


def kernels_for(x: Tensor) -> Kernels:
    """The implementation for x's device."""
    return _on_cuda() if x.device.type == "cuda" else _on_host()


def available() -> dict[str, str]:
    """What computes fake_quantize on "cpu" and "cuda": "compiled", or "reference: " and why.

    Builds or loads the kernels if they are not there yet.
    """
    return {"cpu": _state(_on_host()), "cuda": _state(_on_cuda()) if torch.cuda.is_available() else "reference: no GPU"}


def _state(kernels: Kernels) -> str:
    return f"reference: {kernels.reason}" if isinstance(kernels, ReferenceKernels) else "compiled"


@cache
def _on_host() -> Kernels:
    return _composed("CPU", "not attached")


@cache
def _on_cuda() -> Kernels:
    return _composed("CUDA", "not attached")


def _composed(device: str, reason: str) -> Kernels:
    return ReferenceKernels(reason)
