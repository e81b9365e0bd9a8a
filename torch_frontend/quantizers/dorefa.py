"""DoReFa (Zhou et al. 2016, "DoReFa-Net: Training low bitwidth convolutional neural networks with low bitwidth
gradients"), its weights and activations; gradients stay float.

With quantize_k(r) = round((2**k - 1) r) / (2**k - 1), straight-through:

    weights       2 quantize_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1, the maximum over the whole weight
    activations   quantize_k(clip(x, 0, 1)), of tensors that are never negative

A weight's values are the odd integers from -(2**k - 1) to 2**k - 1 times 1 / (2**k - 1), without zero; an integer type
needs one more bit for them, which `spec` has. The trained weights are the transformed ones; `bake` gives them for the
export. They fill [-1, 1] whatever the float weight was, so a normalization has to follow, and the net must be trained.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from torch import Tensor

from onnxq import observers
from onnxq.arrays import as_float32, as_int32
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.quantizers.base import Quantizer
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.specs import count_elements
from torch_frontend.quantizers.statistics import Statistics, WeightRange


class FixedScale(WeightRange):
    """The scale 1 / (2**k - 1) for every group; only the shape of the observed tensor counts."""

    def __init__(self, spec: QuantSpec, scale: float) -> None:
        super().__init__(spec, ObserverSpec())
        self.scale = scale

    def qparams(self) -> QParams:
        """The fixed scale, zero point 0."""
        shape = count_elements(self.read_weight(), self.spec).shape
        return QParams(np.full(shape, self.scale, np.float32), np.zeros(shape, np.int32), "DoReFa")


class LeastValue:
    """The lowest value of an activation: DoReFa's would lose all that lies below 0."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.least = inf

    def update(self, x: Tensor) -> None:
        """Add a batch."""
        if not x.numel():
            return
        if not x.isfinite().all():
            raise CalibrationError(
                "activation", "holds NaN or inf", "find its source in the float model", code="Q501"
            )
        self.least = min(self.least, float(x.detach().min()))

    def merge(self, other: LeastValue) -> None:
        """Take the lower value of two ranks."""
        self.least = min(self.least, other.least)

    def qparams(self) -> QParams:
        """The fixed scale, zero point 0. Raises CalibrationError for values below 0, or if there were none."""
        if self.least == inf:
            raise observers.base.make_empty_error("DoReFa")
        if self.least < 0:
            cause = (
                f"values down to {self.least:.3g} were seen, and DoReFa clips activations to [0, 1]"
            )
            fix = "use another quantizer here, by a rule with `tensor` and `set: {quantizer: lsq}`"
            raise CalibrationError("activation", cause, fix, code="Q509")
        return QParams(as_float32(self.scale), as_int32(0), "DoReFa")


@register_quantizer("dorefa")
class DoReFa(Quantizer):
    """Weights through tanh onto [-1, 1], activations clipped to [0, 1].

    spec: as configured; a weight's own `spec` has one bit more afterwards: DoReFa's k-bit values are odd integers.
    """

    def __init__(
        self, spec: QuantSpec, *, site: str, role: Role = Role.ACTIVATION, **where: Any
    ) -> None:
        self.level_bits = spec.bits
        if role.is_weight:
            spec = _add_bit(spec, site)
        elif spec.signed or spec.symmetric or not spec.has_one_scale:
            raise ConfigError(
                site,
                "DoReFa's activations lie in [0, 1], one scale for the tensor",
                "use scheme: asymmetric and granularity: tensor, or another quantizer",
                code="Q316",
            )
        super().__init__(spec, site=site, role=role, **where)

    @property
    def step(self) -> float:
        """1 / (2**k - 1)."""
        return 1.0 / ((1 << self.level_bits) - 1)

    def statistics(self) -> Statistics:
        """A collector of the weight's shape: the scale is known, the number of channels is not."""
        return FixedScale(self.spec, self.step) if self.role.is_weight else LeastValue(self.step)

    def load_qparams(self, qparams: QParams) -> None:
        """Use these qparams. Raises CalibrationError unless they are DoReFa's fixed ones."""
        # Exact: a plan holds the scale as float32.
        if np.any(qparams.scale != np.float32(self.step)) or np.any(qparams.zero_point):
            raise CalibrationError(
                self.site,
                f"DoReFa's scale is always {self.step:g} and its zero point 0",
                "use uniform or lsq",
                code="Q509",
            )
        super().load_qparams(qparams)

    def bake(self, x: Tensor) -> Tensor:
        """A weight transformed and quantized; an activation as it is."""
        return (
            self.fake_quantize(x) if self.role.is_weight and self.active and self.calibrated else x
        )

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Transform x and quantize it to DoReFa's values, bit for bit those of the integer spec."""
        if not self.role.is_weight:
            return self.round_to_grid(x, edge="clip")
        squashed = x.tanh()
        share = squashed / (2 * squashed.abs().max()) + 0.5
        scale = self.scale.reshape(-1)[0]  # all scales are equal
        quantized = fake_quantize(
            share, scale, scale.new_zeros(()), qmin=0, qmax=(1 << self.level_bits) - 1
        )
        # 2 q - 1 is an odd multiple of the scale up to its last bit; rounding it again gives the dequantized integer.
        return self.round_to_grid(2 * quantized - 1)


def _add_bit(spec: QuantSpec, site: str) -> QuantSpec:
    if not spec.symmetric or not spec.signed:
        raise ConfigError(
            site, "DoReFa's weights are symmetric and signed", "use scheme: symmetric", code="Q316"
        )
    # There is no integer type of 9 or 17 bits.
    if spec.bits > 7:
        raise ConfigError(
            site,
            f"DoReFa's {spec.bits}-bit weights need {spec.bits + 1}-bit integers",
            "use bits: 7 or fewer, or another quantizer",
            code="Q316",
        )
    # 5 bits do not fit into int4; "" lets QuantSpec choose the type again.
    storage = spec.storage if spec.bits < 4 or spec.storage != "int4" else ""
    return replace(spec, bits=spec.bits + 1, storage=storage)
