"""LSQ+: scale and offset are learned (Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization through learnable
offsets and better initialization").

    y  = round(clip((x - b) / s, n, p)) s + b        db = k sum g [outside]        ds as in LSQ, of t = (x - b) / s

ONNX stores an integer zero point, so the forward pass uses z = round(-b / s), clamped to qmin..qmax, with straight-
through gradients for both: the trained zero point is the exported one, and the gradients of s and b stay the paper's.
In terms of the op, which takes (s, z): dL/dz = -s dL/db and dL/ds at fixed z = dL/ds at fixed b - z dL/db.

Weights are symmetric and start at s = max(|mean - 3 std|, |mean + 3 std|) / 2**(b-1); activations start where the
squared error is least. A symmetric spec has no offset to learn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxq.errors import ConfigError
from onnxq.numerics import scale_floor, symmetric_steps
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from torch_frontend.quantizers import groups
from torch_frontend.quantizers.lsq import LSQ
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.statistics import ActivationRange, Statistics, WeightRange


class ThreeSigma(WeightRange):
    """Three standard deviations around the mean of each group of a weight."""

    def qparams(self) -> QParams:
        """The paper's first scale, and the zero point of the symmetric scheme."""
        weight = self.read_weight().double()
        count = groups.count_elements(weight, self.spec).to(weight.device)
        mean = groups.sum_groups(weight, self.spec) / count
        spread = weight - groups.spread_values(mean, self.spec, tuple(weight.shape))
        deviation = (groups.sum_groups(spread.square(), self.spec) / count).sqrt()
        # As in the paper, 2**(b-1) steps for a side that has 2**(b-1) - 1 of them above zero.
        ends = torch.maximum((mean - 3 * deviation).abs(), (mean + 3 * deviation).abs()).cpu().numpy()
        scale = np.maximum(ends / 2 ** (self.spec.bits - 1), scale_floor(self.spec))
        zero = np.full(scale.shape, self.spec.qmax - symmetric_steps(self.spec))
        return QParams(np.asarray(scale, np.float32), np.asarray(zero, np.int32), "LSQ+, three sigma")


@register_quantizer("lsq+")
class LSQPlus(LSQ):
    """Learned scale and offset. init: "paper" or "observer" (the site's observer)."""

    def __init__(self, spec: QuantSpec, **where: Any) -> None:
        super().__init__(spec, **where)
        if self.role is Role.WEIGHT and not spec.symmetric:
            raise ConfigError(self.site, "LSQ+ quantizes weights symmetrically", "use scheme: symmetric", code="Q316")

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """scale, and the offset b = -z s unless the scheme fixes the zero point."""
        # An offset that the scheme fixes would be a parameter without effect.
        return ("scale",) if self.spec.symmetric else ("scale", "offset")

    @property
    def learned(self) -> frozenset[str]:
        """Scale and offset, if there is one."""
        return frozenset(self.slots)

    @property
    def zero_point(self) -> Tensor | None:
        """-b / s clamped to qmin..qmax, not rounded (the op and `qparams` round it); None until calibrated."""
        if self.scale is None:
            return None
        # Constant: made anew, so that it follows the scale's shape and device.
        if self.spec.symmetric:
            return torch.full_like(self.scale, self.spec.qmax - symmetric_steps(self.spec), requires_grad=False)
        free = -self.offset / self.scale
        # Straight-through: the clamp does not cut the offset's gradient.
        return free + (free.clamp(self.spec.qmin, self.spec.qmax) - free).detach()

    def statistics(self) -> Statistics:
        """Three sigma for weights, least squared error for activations, or the observer's."""
        if self.options["init"] == "observer":
            return super().statistics()
        if self.role is Role.WEIGHT:
            return ThreeSigma(self.spec, ObserverSpec(), self.site)
        return ActivationRange(self.spec, ObserverSpec("mse"), self.site)

    def make_slots(self, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
        """The scale, and b = -z s unless the scheme fixes the zero point."""
        return {"scale": scale} if self.spec.symmetric else {"scale": scale, "offset": -zero_point * scale}

    def keep_legal(self) -> None:
        """Clamp the scale to its floor, and the offset to those of an integer zero point in qmin..qmax."""
        super().keep_legal()
        if not self.spec.symmetric and self.scale is not None:
            scale = self.scale.data
            self.offset.data.copy_(self.offset.data.maximum(-self.spec.qmax * scale).minimum(-self.spec.qmin * scale))
