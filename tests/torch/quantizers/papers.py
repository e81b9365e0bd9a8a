"""The papers' formulas in float64, for autograd, and values to try them on."""

from __future__ import annotations

import numpy as np
import torch

from onnxq.sites import Role
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.quantizers import Quantizer, create_quantizer

Tensor = torch.Tensor


BITS = (2, 3, 4, 8, 16)


EXACT = {"rtol": 1e-11, "atol": 1e-12}


def values(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quantizer(
    name: str, spec: QuantSpec, scale: object, zero: object = 0, role: Role = Role.WEIGHT, **how
) -> Quantizer:
    made = create_quantizer(name, spec, site="s", role=role, **how)
    scale = np.asarray(scale, np.float32)
    made.load_qparams(QParams(scale, np.broadcast_to(np.asarray(zero, np.int32), scale.shape).copy()))
    return made.double()


def rounded(t: Tensor) -> Tensor:
    return t + (t.round() - t).detach()


def factored(s: Tensor, factor: float) -> Tensor:
    """s, with its gradient multiplied."""
    return s * factor + (s - s * factor).detach()


def along(s: Tensor, spec: QuantSpec, x: Tensor) -> Tensor:
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return s
    if isinstance(grain, PerChannel):
        return s.reshape([-1 if k == grain.axis % x.dim() else 1 for k in range(x.dim())])
    return s.repeat_interleave(grain.size, grain.axis).narrow(grain.axis, 0, x.shape[grain.axis])
