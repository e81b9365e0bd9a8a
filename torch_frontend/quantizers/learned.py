"""Learned scales and clipping levels: LSQ, LSQ+ and PACT.

LSQ: the scale is learned (Esser et al. 2020, "Learned Step Size Quantization").

With t = x / s, n = qmin - z, p = qmax - z:

    y  = round(clip(t, n, p)) s
    dx = g [n < t < p]
    ds = k sum g {n if t <= n, p if t >= p, round(t) - t between},    k = 1 / sqrt(N p)
    s0 = 2 mean|x| / sqrt(p)

N counts the elements that share a scale: of a weight all of them, of an activation those of one sample, so that
the step does not depend on the batch size. The paper has n = -2**(b-1) or 0 and z = 0. An asymmetric spec on
data below zero keeps the integer zero point of the observed range here, fixed, and p stands for the longer side.

LSQ+: scale and offset are learned (Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization through learnable
offsets and better initialization").

    y  = round(clip((x - b) / s, n, p)) s + b        db = k sum g [outside]        ds as in LSQ, of t = (x - b) / s

ONNX stores an integer zero point, so the forward pass uses z = round(-b / s), clamped to qmin..qmax, with straight-
through gradients for both: the trained zero point is the exported one, and the gradients of s and b stay the paper's.
In terms of the op, which takes (s, z): dL/dz = -s dL/db and dL/ds at fixed z = dL/ds at fixed b - z dL/db.

Weights are symmetric and start at s = max(|mean - 3 std|, |mean + 3 std|) / 2**(b-1); activations start where the
squared error is least. A symmetric spec has no offset to learn.

PACT: the clipping level is learned (Choi et al. 2018, "PACT: Parameterized Clipping Activation").

    c = clip(x, 0, a)    y = round(c (2**k - 1) / a) a / (2**k - 1)    dx = g [0 < x < a]    da = sum g [x >= a]

The rounding residual does not enter the gradient of a, unlike LSQ's. The paper keeps a small by an L2 penalty
(`penalty`), starts it at a large value, and quantizes outputs of ReLU. For other tensors the lower end follows a:
b = a (qmin - z) / (qmax - z), with the integer zero point z of the observed range (0 for a signed symmetric spec), and
da counts x <= b with that ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from onnxq import observers
from onnxq.errors import CalibrationError, ConfigError
from onnxq.numerics import scale_floor, symmetric_steps
from onnxq.sites import Names, NameSet, Role
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from torch_frontend.quantizers.base import Options, Quantizer
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.specs import (
    count_elements,
    find_zero_point,
    make_qparams,
    spread_values,
    sum_groups,
)
from torch_frontend.quantizers.statistics import (
    ActivationRange,
    Statistics,
    WeightRange,
    range_statistics,
)


class LearnedQuantizer(Quantizer):
    """A quantizer that learns all of its slots but the zero point.

    init: "paper" (as its paper starts) or "observer" (the site's observer; steadier at 8 bits).
    """

    defaults: ClassVar[Options] = {"init": "paper"}
    choices: ClassVar[Mapping[str, Names]] = {"init": ("paper", "observer")}

    @property
    def learned(self) -> NameSet:
        """All slots but the zero point."""
        return frozenset(self.slots) - {"zero_point"}

    def statistics(self) -> Statistics:
        """A collector for the paper's first qparams, or the observer's."""
        return (
            super().statistics()
            if self.options["init"] == "observer"
            else self.make_paper_statistics()
        )

    def make_paper_statistics(self) -> Statistics:
        """A collector for the paper's first qparams."""
        raise NotImplementedError


class MeanMagnitude:
    """Mean of |x| of each group; for an asymmetric spec also the range, which gives the zero point."""

    def __init__(self, spec: QuantSpec, role: Role, site: str) -> None:
        self.spec = spec
        self.role = role
        self._range = None if spec.symmetric else range_statistics(spec, ObserverSpec(), role, site)
        # [2, ...]: the sum of |x| and the number of elements of each group.
        self._sums: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Add a batch; a weight replaces the one before."""
        if not x.numel():
            return
        # Sums in float64 on the host: they add up over batches and ranks and must not depend on the device.
        total = sum_groups(x.detach().abs(), self.spec).cpu()
        if not total.isfinite().all():
            raise CalibrationError(
                self.role,
                "holds NaN or inf",
                "find what makes it in the float model",
                code="Q501",
            )
        if self._range is not None:
            self._range.update(x)
        sums = torch.stack([total, count_elements(x, self.spec)])
        self._sums = sums if self._sums is None or self.role.is_weight else self._sums + sums

    def merge(self, other: MeanMagnitude) -> None:
        """Add another rank's sums and counts; a weight is the same on every rank."""
        if self._range is not None:
            self._range.merge(other._range)
        if self._sums is None:
            self._sums = other._sums
        elif not self.role.is_weight and other._sums is not None:
            self._sums = self._sums + other._sums

    def qparams(self) -> QParams:
        """The paper's first scale. Raises CalibrationError if nothing was observed."""
        if self._sums is None:
            raise observers.base.make_empty_error("LSQ")
        mean = (self._sums[0] / self._sums[1]).numpy()
        if self._range is None:
            zero = np.full(mean.shape, find_zero_point(self.spec))
            steps = symmetric_steps(self.spec)
        else:
            zero = self._range.qparams().zero_point
            # p stands for the longer side, see above.
            steps = np.maximum(self.spec.qmax - zero, zero - self.spec.qmin)
        return make_qparams(
            2.0 * mean / np.sqrt(steps), zero, self.spec, "LSQ, 2 mean|x| / sqrt(p)"
        )


@register_quantizer("lsq")
class LSQ(LearnedQuantizer):
    """Learned scale. init: "paper" (2 mean|x| / sqrt(p)) or "observer" (the site's observer; steadier at 8 bits)."""

    def make_paper_statistics(self) -> Statistics:
        """A collector of the mean magnitude."""
        return MeanMagnitude(self.spec, self.role, self.site)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Clip, then round; the scale's gradient is multiplied by the paper's factor 1 / sqrt(N p)."""
        steps = (
            symmetric_steps(self.spec) if self.spec.symmetric else self.spec.qmax - self.spec.qmin
        )
        # Of an activation one sample counts, see above.
        shape = x.shape if self.role.is_weight else x.shape[1:]
        elements = max(prod(shape) / self.scale.numel(), 1)
        return self.round_to_grid(x, edge="clip", grad_scale=1.0 / sqrt(elements * steps))


class ThreeSigma(WeightRange):
    """Three standard deviations around the mean of each group of a weight."""

    def qparams(self) -> QParams:
        """The paper's first scale, and the zero point of the symmetric scheme."""
        spec = self.spec
        weight = self.read_weight().double()
        count = count_elements(weight, spec).to(weight.device)
        mean = sum_groups(weight, spec) / count
        spread = weight - spread_values(mean, spec, tuple(weight.shape))
        deviation = (sum_groups(spread.square(), spec) / count).sqrt()
        # As in the paper, 2**(b-1) steps for a side that has 2**(b-1) - 1 of them above zero.
        ends = (
            torch.maximum((mean - 3 * deviation).abs(), (mean + 3 * deviation).abs()).cpu().numpy()
        )
        zero = np.full(ends.shape, find_zero_point(spec))
        return make_qparams(ends / 2 ** (spec.bits - 1), zero, spec, "LSQ+, three sigma")


@register_quantizer("lsq+")
class LSQPlus(LSQ):
    """Learned scale and offset. init: "paper" or "observer" (the site's observer)."""

    def __init__(self, spec: QuantSpec, **where: Any) -> None:
        super().__init__(spec, **where)
        if self.role.is_weight and not spec.symmetric:
            raise ConfigError(
                self.site,
                "LSQ+ quantizes weights symmetrically",
                "use scheme: symmetric",
                code="Q316",
            )

    @property
    def slots(self) -> Names:  # type: ignore[override]
        """scale, and the offset b = -z s unless the scheme fixes the zero point."""
        # An offset that the scheme fixes would be a parameter without effect.
        return ("scale",) if self.spec.symmetric else ("scale", "offset")

    @property
    def zero_point(self) -> Tensor | None:
        """-b / s clamped to qmin..qmax, not rounded (the op and `qparams` round it); None until calibrated."""
        if self.scale is None:
            return None
        fixed = find_zero_point(self.spec)
        # Constant: made anew, so that it follows the scale's shape and device.
        if fixed is not None:
            return torch.full_like(self.scale, fixed, requires_grad=False)
        free = -self.offset / self.scale
        # Straight-through: the clamp does not cut the offset's gradient.
        return free + (free.clamp(self.spec.qmin, self.spec.qmax) - free).detach()

    def make_paper_statistics(self) -> Statistics:
        """Three sigma for weights, least squared error for activations."""
        if self.role.is_weight:
            return ThreeSigma(self.spec, ObserverSpec())
        return ActivationRange(self.spec, ObserverSpec("mse"), self.site)

    def make_slots(self, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
        """The scale, and b = -z s unless the scheme fixes the zero point."""
        return (
            {"scale": scale}
            if self.spec.symmetric
            else {"scale": scale, "offset": -zero_point * scale}
        )

    def keep_legal(self) -> None:
        """Clamp the scale to its floor, and the offset to those of an integer zero point in qmin..qmax."""
        super().keep_legal()
        if not self.spec.symmetric and self.scale is not None:
            scale = self.scale.data
            # The offset is -z s: the ends of the zero point change places.
            self.offset.data.copy_(
                self.offset.data.maximum(-self.spec.qmax * scale).minimum(-self.spec.qmin * scale)
            )


class StartingClip(ActivationRange):
    """Collector for the paper's start: the observed range gives the zero point, the option `alpha` the scale."""

    def __init__(self, spec: QuantSpec, observer: ObserverSpec, site: str, alpha: float) -> None:
        super().__init__(spec, observer, site)
        self.alpha = alpha

    def qparams(self) -> QParams:
        """The observed zero point, and the scale that dequantizes qmax to alpha."""
        zero = super().qparams().zero_point
        # Zero points at qmax leave no values above 0; `make_slots` refuses them with the site's name.
        steps = np.maximum(self.spec.qmax - zero, 1)
        return QParams(
            np.asarray(self.alpha / steps, np.float32), zero, f"PACT, alpha {self.alpha:g}"
        )


@register_quantizer("pact")
class PACT(LearnedQuantizer):
    """Learned clipping level of an activation, per tensor.

    init: "paper" (the option `alpha`) or "observer" (the highest value of the site's observer).
    l2: factor of the penalty l2 * alpha**2, which the training loop adds to its loss.
    """

    # alpha 10: the start in the paper's experiments.
    defaults: ClassVar[Options] = {"init": "paper", "alpha": 10.0, "l2": 1e-4}
    roles = (Role.ACTIVATION, Role.OUTPUT)
    slots = ("alpha", "zero_point")

    def __init__(self, spec: QuantSpec, **where: Any) -> None:
        super().__init__(spec, **where)
        if not spec.has_one_scale:
            cause = "PACT has one clipping level for the tensor"
            raise ConfigError(self.site, cause, "use granularity: tensor", code="Q316")
        if self.options["alpha"] <= 0:
            cause = f"alpha={self.options['alpha']} is not positive"
            raise ConfigError(self.site, cause, "the paper starts at 10", code="Q311")

    @property
    def scale(self) -> Tensor | None:
        """alpha / (qmax - zero point); None until calibrated."""
        return None if self.alpha is None else self.alpha / (self.spec.qmax - self.zero_point)

    def make_paper_statistics(self) -> Statistics:
        """The observer's collector, for its zero point only."""
        return StartingClip(self.spec, self.observer, self.site, self.options["alpha"])

    def make_slots(self, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
        """alpha = scale (qmax - z). Raises CalibrationError naming the site where there is no integer above z."""
        above = self.spec.qmax - zero_point
        if not (above > 0).all():
            cause = "no value above zero was seen, and PACT learns the upper end"
            raise CalibrationError(self.site, cause, "use lsq+", code="Q509")
        return {"alpha": scale * above, "zero_point": zero_point}

    def keep_legal(self) -> None:
        """Clamp alpha to the smallest scale times the number of steps."""
        if self.alpha is not None:
            self.alpha.data.clamp_(min=scale_floor(self.spec) * (self.spec.qmax - self.spec.qmin))

    def penalty(self) -> Tensor | None:
        """l2 * alpha**2; None while frozen, off or not calibrated."""
        if self.alpha is None or self.frozen or not self.active:
            return None
        return self.options["l2"] * self.alpha.square()

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Clip with the paper's gradients, then quantize with a fixed scale, which passes them unchanged."""
        scale = self.scale
        # low depends on alpha through the scale: x <= low adds its share to alpha's gradient.
        low = (self.spec.qmin - self.zero_point) * scale
        high = self.alpha
        # NaN compares false with both ends, so it passes. detach: the rounding residual gives alpha no gradient.
        clipped = torch.where(
            x >= high, high.to(x.dtype), torch.where(x <= low, low.to(x.dtype), x)
        )
        return self.round_to_grid(clipped, scale.detach())
