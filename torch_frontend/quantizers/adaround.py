"""AdaRound: rounding up or down is learned (Nagel et al. 2020, "Up or Down? Adaptive Rounding").

    h(v) = clip(sigmoid(v) (zeta - gamma) + gamma, 0, 1)        zeta = 1.1, gamma = -0.1
    soft    y = (clip(floor(w / s) + h(v) + z, qmin, qmax) - z) s
    hard    h(v) >= 1/2 counts as 1, else as 0
    regularizer    sum(1 - |2 h(v) - 1|**beta), which drives h to 0 or 1 as beta falls

A weight that keeps 16-bit sums keeps them while rounded to nearest, soft and hard: integers are moved as by
`onnxq.numerics.limit_sums`; soft, both neighbours of a sum give half of the excess.

v starts where soft equals the float weight. `torch_frontend.reconstruct` does the learning; until then a weight is
rounded to nearest.
"""

from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from onnxq.errors import CalibrationError
from onnxq.sites import Role
from torch_frontend.fake_quant.sums import keep_soft_sums, keep_sums
from torch_frontend.quantizers.base import Options, Quantizer
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.specs import spread_values


class Rounding(str, Enum):
    """How a weight is rounded."""

    NEAREST = "nearest"
    SOFT = "soft"
    HARD = "hard"


@register_quantizer("adaround")
class AdaRound(Quantizer):
    """Learned rounding of a weight whose scale is fixed. `v` is absent until learning starts."""

    # The paper's stretch of the sigmoid, which lets h reach exactly 0 and 1.
    defaults: ClassVar[Options] = {"zeta": 1.1, "gamma": -0.1}
    roles = (Role.WEIGHT,)
    slots = ("scale", "zero_point", "v")
    # A calibrated weight rounds to nearest until learning starts.
    optional = frozenset({"v"})

    def __init__(self, *args: Any, **where: Any) -> None:
        super().__init__(*args, **where)
        self.soft = False

    @property
    def rounding(self) -> Rounding:
        """Nearest before learning, soft during it, hard afterwards."""
        if self.v is None:
            return Rounding.NEAREST
        return Rounding.SOFT if self.soft else Rounding.HARD

    def start_learning(self, w: Tensor) -> Tensor:
        """Start to learn the rounding of the float weight w, in soft mode; return v, which requires a gradient.

        Raises CalibrationError before calibration, or if w / scale is NaN or inf.
        """
        scale, _ = self._read_qparams()
        with torch.no_grad():
            ratio = w.detach().float() / spread_values(scale, self.spec, tuple(w.shape))
            rest = ratio - ratio.floor()
            zeta = self.options["zeta"]
            gamma = self.options["gamma"]
            # The inverse of h. Finite, since gamma < 0 <= rest < 1 < zeta, unless w / s is NaN or inf.
            start = -torch.log((zeta - gamma) / (rest - gamma) - 1)
        if not start.isfinite().all():
            raise CalibrationError(
                self.site,
                "the weight or its scale holds NaN or inf",
                "repair the float model",
                code="Q503",
            )
        self.v = start.requires_grad_()
        self.soft = True
        return self.v

    def stop_learning(self) -> None:
        """Fix every rounding to up or down."""
        if self.v is not None:
            self.v = self.v.detach()
        self.soft = False

    def forget_rounding(self) -> None:
        """Round to nearest again."""
        self.v = None
        self.soft = False

    def share_up(self) -> Tensor:
        """h(v) in [0, 1], of the weight's shape."""
        zeta = self.options["zeta"]
        gamma = self.options["gamma"]
        return (torch.sigmoid(self.v) * (zeta - gamma) + gamma).clamp(0, 1)

    def regularizer(self, beta: float) -> Tensor:
        """sum(1 - |2 h(v) - 1|**beta)."""
        return (1 - (2 * self.share_up() - 1).abs().pow(beta)).sum()

    def fake_quantize(self, x: Tensor) -> Tensor:
        """The weight rounded to nearest, soft or hard, by `rounding`."""
        rounding = self.rounding
        if rounding is Rounding.SOFT:
            return self._round_with(x, self.share_up(), soft=True)
        if rounding is Rounding.HARD:
            # Straight-through, so that training can continue from the learned rounding.
            x = x + (self.bake(x) - x).detach()
        return self.round_to_grid(x)

    def bake(self, x: Tensor) -> Tensor:
        """The weight with its learned rounding, if there is any; rounding the result to nearest does not change it."""
        if self.v is None or not (self.active and self.calibrated):
            return x
        with torch.no_grad():
            # h(v) >= 1/2 is v >= 0, for zeta + gamma = 1.
            return self._round_with(x, (self.v >= 0).to(self.v.dtype), soft=False)

    def _round_with(self, x: Tensor, up: Tensor, *, soft: bool) -> Tensor:
        """x at floor(x / s) + up, dequantized. up: share rounded up, in [0, 1], of x's shape."""
        shape = tuple(x.shape)
        if up.shape != x.shape:
            raise CalibrationError(
                self.site, f"rounding was learned for {tuple(up.shape)}, not {shape}", "learn again"
            )
        scale, zero = (spread_values(t, self.spec, shape) for t in self._read_qparams())
        ratio = x.detach().to(scale.dtype) / scale
        codes = (ratio.floor() + up + zero).clamp(self.spec.qmin, self.spec.qmax)
        if orders := self.sum_orders():
            codes = (
                keep_soft_sums(codes, orders) if soft else keep_sums(codes, ratio + zero, orders)[0]
            )
        return ((codes - zero) * scale).to(x.dtype)
