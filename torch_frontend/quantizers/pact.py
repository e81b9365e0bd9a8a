"""PACT: the clipping level is learned (Choi et al. 2018, "PACT: Parameterized Clipping Activation").

    c = clip(x, 0, a)    y = round(c (2**k - 1) / a) a / (2**k - 1)    dx = g [0 < x < a]    da = sum g [x >= a]

The rounding residual does not enter the gradient of a, unlike LSQ's. The paper keeps a small by an L2 penalty
(`penalty`), starts it at a large value, and quantizes outputs of ReLU. For other tensors the lower end follows a:
b = a (qmin - z) / (qmax - z), with the integer zero point z of the observed range (0 for a signed symmetric spec), and
da counts x <= b with that ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from onnxq.errors import CalibrationError, ConfigError
from onnxq.numerics import scale_floor
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerTensor, QParams, QuantSpec
from torch_frontend.quantizers.base import Option, Quantizer
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.statistics import ActivationRange, Statistics


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
        return QParams(np.asarray(self.alpha / steps, np.float32), zero, f"PACT, alpha {self.alpha:g}")


@register_quantizer("pact")
class PACT(Quantizer):
    """Learned clipping level of an activation, per tensor.

    init: "paper" (the option `alpha`) or "observer" (the highest value of the site's observer).
    l2: factor of the penalty l2 * alpha**2, which the training loop adds to its loss.
    """

    # alpha 10: the start in the paper's experiments.
    defaults: ClassVar[Mapping[str, Option]] = {"init": "paper", "alpha": 10.0, "l2": 1e-4}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"init": ("paper", "observer")}
    roles: ClassVar[tuple[Role, ...]] = (Role.ACTIVATION, Role.OUTPUT)
    slots: ClassVar[tuple[str, ...]] = ("alpha", "zero_point")

    def __init__(self, spec: QuantSpec, **where: Any) -> None:
        super().__init__(spec, **where)
        if not isinstance(spec.granularity, PerTensor):
            raise ConfigError(
                self.site, "PACT has one clipping level for the tensor", "use granularity: tensor", code="Q316"
            )
        if self.options["alpha"] <= 0:
            raise ConfigError(
                self.site, f"alpha={self.options['alpha']} is not positive", "the paper starts at 10", code="Q311"
            )

    @property
    def learned(self) -> frozenset[str]:
        """The clipping level."""
        return frozenset({"alpha"})

    @property
    def scale(self) -> Tensor | None:
        """alpha / (qmax - zero point); None until calibrated."""
        return None if self.alpha is None else self.alpha / (self.spec.qmax - self.zero_point)

    def statistics(self) -> Statistics:
        """The observer's collector, used whole or for its zero point only."""
        if self.options["init"] == "observer":
            return super().statistics()
        return StartingClip(self.spec, self.observer, self.site, self.options["alpha"])

    def make_slots(self, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
        """alpha = scale (qmax - z). Raises CalibrationError naming the site where there is no integer above z."""
        above = self.spec.qmax - zero_point
        if not bool((above > 0).all()):
            raise CalibrationError(
                self.site, "no value above zero was seen, and PACT learns the upper end", "use lsq+", code="Q509"
            )
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
        low, high = (self.spec.qmin - self.zero_point) * scale, self.alpha
        # NaN compares false with both ends, so it passes. detach: the rounding residual gives alpha no gradient.
        clipped = torch.where(x >= high, high.to(x.dtype), torch.where(x <= low, low.to(x.dtype), x))
        return self.round_to_grid(clipped, scale.detach())
