"""Tensors and qparams for calls of fake_quantize."""

from typing import Any

import torch


def make_qparams(shape: tuple[int, ...], dtype: Any = torch.float32) -> tuple[Any, Any]:
    rng = torch.Generator().manual_seed(3)
    return (torch.rand(shape, generator=rng) * 0.1 + 0.05).to(dtype), torch.rand(shape, generator=rng).to(dtype)


def make_x(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))
