"""Quantizers by name, calibrated or with given numbers; values to quantize, and the papers' formulas in float64."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from onnxq.sites import Role
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.quantizers import Quantizer, create_quantizer

NAMES = ("adaround", "dorefa", "lsq", "lsq+", "pact", "uniform")
ACTIVATIONS = ("dorefa", "lsq", "lsq+", "pact", "uniform")
UINT8 = QuantSpec(signed=False, symmetric=False)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def unsigned(bits: int) -> QuantSpec:
    return QuantSpec(bits=bits, signed=False, symmetric=False)


def weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (8, 6, 3, 3)), generator=torch.Generator().manual_seed(seed))


def values(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calibrated(name: str, spec: QuantSpec, *seen: Tensor, role: Role = Role.WEIGHT, **how) -> Quantizer:
    made = create_quantizer(name, spec, site="conv.weight", role=role, **how)
    for batch in seen:
        made.observe(batch)
    made.calc_qparams()
    return made


def four_bits(name: str, seed: int = 0) -> Quantizer:
    """A calibrated quantizer in the role that its name has."""
    return calibrated(name, QuantSpec(bits=4), weight(seed=seed), role=role_of(name))


def role_of(name: str) -> Role:
    return Role.ACTIVATION if name == "pact" else Role.WEIGHT


def quantizer(
    name: str, spec: QuantSpec, scale: object, zero: object = 0, role: Role = Role.WEIGHT, **how
) -> Quantizer:
    """In float64, with these numbers."""
    made = create_quantizer(name, spec, site="s", role=role, **how)
    scale = np.asarray(scale, np.float32)
    made.load_qparams(QParams(scale, np.broadcast_to(np.asarray(zero, np.int32), scale.shape).copy()))
    return made.double()


def assert_gradients(made: Quantizer, x: Tensor, formula: Callable[..., Tensor], *slots: str, **near: float) -> None:
    """Values and gradients are those of formula(x, *slots) by autograd. near: tolerance, but of the gradient of x."""
    near = near or EXACT
    learned = [getattr(made, slot) for slot in slots]
    ours, dy = x.clone().requires_grad_(), values(*x.shape, seed=1)
    made(ours).backward(dy)
    theirs, *leaves = (t.detach().clone().requires_grad_() for t in (x, *learned))
    y = formula(theirs, *leaves)
    y.backward(dy)
    torch.testing.assert_close(made(x), y, **near)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    for slot, leaf in zip(learned, leaves, strict=True):
        torch.testing.assert_close(slot.grad, leaf.grad, **near)


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
