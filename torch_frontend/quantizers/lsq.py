"""LSQ: the scale is learned (Esser et al. 2020, "Learned Step Size Quantization").

With t = x / s, n = qmin - z, p = qmax - z:

    y  = round(clip(t, n, p)) s
    dx = g [n < t < p]
    ds = k sum g {n if t <= n, p if t >= p, round(t) - t between},    k = 1 / sqrt(N p)
    s0 = 2 mean|x| / sqrt(p)

N counts the elements that share a scale: of a weight all of them, of an activation those of one sample, so that
the step does not depend on the batch size. The paper has n = -2**(b-1) or 0 and z = 0. An asymmetric spec on
data below zero keeps the integer zero point of the observed range here, fixed, and p stands for the longer side.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from onnxq import observers
from onnxq.errors import CalibrationError
from onnxq.numerics import scale_floor, symmetric_steps
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from torch_frontend.quantizers import groups
from torch_frontend.quantizers.base import Option, Quantizer
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.statistics import Statistics, range_statistics


class MeanMagnitude:
    """Mean of |x| of each group; for an asymmetric spec also the range, which gives the zero point."""

    def __init__(self, spec: QuantSpec, role: Role, site: str) -> None:
        self.spec, self.role = spec, role
        self._range = None if spec.symmetric else range_statistics(spec, ObserverSpec(), role, site)
        # [2, ...]: the sum of |x| and the number of elements of each group.
        self._sums: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Add a batch; a weight replaces the one before."""
        if not x.numel():
            return
        # Sums in float64 on the host: they add up over batches and ranks and must not depend on the device.
        total = groups.sum_groups(x.detach().abs(), self.spec).cpu()
        if not bool(total.isfinite().all()):
            raise CalibrationError(
                str(self.role), "holds NaN or inf", "find what makes it in the float model", code="Q501"
            )
        if self._range is not None:
            self._range.update(x)
        sums = torch.stack([total, groups.count_elements(x, self.spec)])
        self._sums = sums if self._sums is None or self.role is Role.WEIGHT else self._sums + sums

    def merge(self, other: MeanMagnitude) -> None:
        """Add another rank's sums and counts; a weight is the same on every rank."""
        if self._range is not None:
            self._range.merge(other._range)
        if self._sums is None:
            self._sums = other._sums
        elif self.role is not Role.WEIGHT and other._sums is not None:
            self._sums = self._sums + other._sums

    def qparams(self) -> QParams:
        """The paper's first scale. Raises CalibrationError if nothing was observed."""
        if self._sums is None:
            raise observers.base.make_empty_error("LSQ")
        mean = (self._sums[0] / self._sums[1]).numpy()
        if self._range is None:
            steps = np.asarray(symmetric_steps(self.spec))
            zero = np.full(mean.shape, self.spec.qmax - steps)
        else:
            zero = self._range.qparams().zero_point
            # p stands for the longer side, see above.
            steps = np.maximum(self.spec.qmax - zero, zero - self.spec.qmin)
        # A group of zeros would get scale 0.
        scale = np.maximum(2.0 * mean / np.sqrt(steps), scale_floor(self.spec))
        return QParams(np.asarray(scale, np.float32), np.asarray(zero, np.int32), "LSQ, 2 mean|x| / sqrt(p)")


def gradient_factor(x: Tensor, quantizer: Quantizer, groups_of: int) -> float:
    """1 / sqrt(N p) for a tensor x with `groups_of` scales."""
    spec = quantizer.spec
    steps = symmetric_steps(spec) if spec.symmetric else spec.qmax - spec.qmin
    # Of an activation one sample counts, see above.
    shape = x.shape if quantizer.role is Role.WEIGHT else x.shape[1:]
    return 1.0 / sqrt(max(prod(shape) / groups_of, 1) * steps)


@register_quantizer("lsq")
class LSQ(Quantizer):
    """Learned scale. init: "paper" (2 mean|x| / sqrt(p)) or "observer" (the site's observer; steadier at 8 bits)."""

    defaults: ClassVar[Mapping[str, Option]] = {"init": "paper"}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"init": ("paper", "observer")}

    @property
    def learned(self) -> frozenset[str]:
        """The scale."""
        return frozenset({"scale"})

    def statistics(self) -> Statistics:
        """A collector of the mean magnitude, or the observer's."""
        if self.options["init"] == "observer":
            return super().statistics()
        return MeanMagnitude(self.spec, self.role, self.site)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Clip, then round; the scale's gradient is multiplied by the paper's factor."""
        return self.round_to_grid(x, edge="clip", grad_scale=gradient_factor(x, self, self.scale.numel()))
