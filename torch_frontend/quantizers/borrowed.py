"""Quantizers without qparams of their own: on scales of each run, or on those of another site.

Scales of each run are computed from the values themselves, nothing observed, nothing stored:

    asymmetric    s = (max(x, 0) - min(x, 0)) / (qmax - qmin),  z = rint(qmin - min(x, 0) / s)
    symmetric     s = max|x| / qmax,                            z = 0

over the tensor, as ONNX's DynamicQuantizeLinear has it; over each token (the last axis); or over blocks of it, as
ONNX Runtime's MatMulNBits does for its data, symmetric in int8, at accuracy level 4. No value is clipped, so gradients
pass straight through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.sites import Names, Role
from onnxq.spec import QParams, QuantSpec
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.quantizers.base import Options, Quantizer
from torch_frontend.quantizers.registry import register_quantizer
from torch_frontend.quantizers.specs import mark_tensor


@register_quantizer("dynamic")
class Dynamic(Quantizer):
    """A scale for each tensor, token or block of a token, of every run.

    scales: "tensor", "token" or "block" of `block_size` along the last axis. Only "tensor" in asymmetric uint8 has
    nodes in ONNX: a spec with `dynamic`. Others leave no marker: the engine quantizes by itself there.
    """

    defaults: ClassVar[Options] = {"scales": "tensor", "block_size": 32}
    choices: ClassVar[Mapping[str, Names]] = {"scales": ("tensor", "token", "block")}
    roles = (Role.ACTIVATION, Role.OUTPUT)
    slots = ()

    def __init__(self, spec: QuantSpec, **where: Any) -> None:
        super().__init__(spec, **where)
        # Others have no nodes in ONNX.
        self.marks = spec.dynamic
        if not spec.has_one_scale or spec.symmetric != spec.signed:
            raise ConfigError(
                self.site,
                "scales of each run are signed symmetric or unsigned asymmetric, and `scales` groups them",
                "use granularity: tensor, and signed: true for scheme: symmetric",
                code="Q316",
            )
        if spec.dynamic and self.options["scales"] != "tensor":
            raise ConfigError(
                self.site,
                "ONNX's DynamicQuantizeLinear has one scale for the tensor",
                "write `scales: tensor`, or `mode: weight-only`",
                code="Q316",
            )
        if not isinstance(size := self.options["block_size"], int) or size < 1:
            raise ConfigError(
                self.site,
                f"block_size={size} is not positive",
                "MatMulNBits has 32 to 256",
                code="Q311",
            )

    def observe(self, x: Tensor) -> None:
        """Nothing is observed."""

    def calc_qparams(self) -> None:
        """Nothing is calculated before a run."""

    def load_qparams(self, qparams: QParams) -> None:
        """Raise CalibrationError: there are none."""
        raise CalibrationError(
            self.site, "computes its scale at each run", "load no qparams here", code="Q509"
        )

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x on grids of its own range."""
        # An empty tensor has no least and no greatest value.
        if not x.numel():
            return x
        scales = self.options["scales"]
        width = x.shape[-1] if x.dim() else 1
        if scales == "block":
            width = min(int(self.options["block_size"]), width)
            if x.shape[-1] % width:
                cause = f"blocks of {width} do not divide {x.shape[-1]} features"
                raise PlanError(self.site, cause, "use scales: token", code="Q407")
        # One row for each scale.
        rows = x.reshape((1, x.numel()) if scales == "tensor" else (-1, width))
        scale, zero = self._compute_grid(rows)
        grid_values = fake_quantize(
            rows, scale, zero, axis=0, qmin=self.spec.qmin, qmax=self.spec.qmax
        )
        return grid_values.reshape(x.shape)

    def _compute_grid(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of each row."""
        spec = self.spec
        # Scales follow the data and are not learned.
        with torch.no_grad():
            # In half precision a scale would have 11 bits.
            low, high = (end.float() for end in torch.aminmax(rows, dim=1))
            low = low.clamp(max=0)
            high = high.clamp(min=0)
            span = spec.qmax - spec.qmin
            if spec.symmetric:
                low, high, span = torch.zeros_like(low), torch.maximum(-low, high), spec.qmax
            width = high - low
            # As ONNX Runtime: rows of zeros have scale 1.
            scale = torch.where(width > 0, width / span, torch.ones_like(width))
            zero = torch.zeros_like(low) if spec.symmetric else (spec.qmin - low / scale).round()
        return scale, zero

    def marked(self, x: Tensor) -> Tensor:
        """Return x through a marker node without numbers, or x itself where ONNX has no nodes for it."""
        if not (self.active and self.marks):
            return x
        return mark_tensor(x, None, None, self.spec, site=self.site, role=self.role)

    def prepare_marker(self, weight: Tensor | None = None) -> None:
        """The marker has no numbers to fix."""

    def extra_repr(self) -> str:
        """Site, bits, scheme and the group that a scale belongs to."""
        size = f" of {self.options['block_size']}" if self.options["scales"] == "block" else ""
        spec = self.spec
        text = f"{self.site!r}, {spec.bits} bits {spec.scheme} {spec.storage} per {self.options['scales']}{size}"
        return text + ", at each run" + ("" if self.active else ", off")


class Follower(Quantizer):
    """Quantizes with its leader's qparams; what passes here counts for the leader's range if it contributes.

    It has no qparams and no parameters of its own, so nothing is trained or stored twice.
    """

    name = "follower"
    slots = ()

    def __init__(self, leader: Quantizer, site: str, *, contributes: bool = True) -> None:
        super().__init__(
            leader.spec, site=site, role=leader.role, observer=leader.observer, target=leader.target
        )
        self.contributes = contributes
        # In a tuple, so that it is no child: the leader stands elsewhere in the model already.
        self._leader = (leader,)

    @property
    def leader(self) -> Quantizer:
        """The quantizer whose qparams are used."""
        return self._leader[0]

    @property
    def calibrated(self) -> bool:
        """True when the leader is."""
        return self.leader.calibrated

    @property
    def scale(self) -> Tensor | None:  # type: ignore[override]
        """The leader's."""
        return self.leader.scale

    @property
    def zero_point(self) -> Tensor | None:  # type: ignore[override]
        """The leader's."""
        return self.leader.zero_point

    def observe(self, x: Tensor) -> None:
        """Let the leader see x, if this site contributes."""
        if self.contributes:
            self._name_errors(lambda: self.leader.observe(x))

    def calc_qparams(self) -> None:
        """The leader calculates."""

    def load_qparams(self, qparams: QParams) -> None:
        """Give the qparams to the leader."""
        self.leader.load_qparams(qparams)

    def qparams(self) -> QParams:
        """The leader's qparams."""
        return self._name_errors(self.leader.qparams)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x on the leader's grid."""
        return self.leader.fake_quantize(x)

    def _read_qparams(self) -> tuple[Tensor, Tensor]:
        return self.leader._read_qparams()

    # Its tensors are the leader's, which moves with the module that it stands in.
    def _apply(self, fn: Any, recurse: bool = True) -> Follower:
        return self
