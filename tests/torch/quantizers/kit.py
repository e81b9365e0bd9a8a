"""Quantizers by name, weights and activations to quantize, and calibrated quantizers."""

from __future__ import annotations

import torch

from onnxq.sites import Role
from onnxq.spec import QuantSpec
from torch_frontend.quantizers import (
    Quantizer,
    create_quantizer,
)

NAMES = ("adaround", "dorefa", "lsq", "lsq+", "pact", "uniform")


ACTIVATIONS = ("dorefa", "lsq", "lsq+", "pact", "uniform")


UINT8 = QuantSpec(signed=False, symmetric=False)


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (8, 6, 3, 3)), generator=torch.Generator().manual_seed(seed))


def calibrated(name: str, spec: QuantSpec, seen: torch.Tensor, role: Role = Role.WEIGHT, **how) -> Quantizer:
    made = create_quantizer(name, spec, site="conv.weight", role=role, **how)
    made.observe(seen)
    made.calc_qparams()
    return made
