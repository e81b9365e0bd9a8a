"""A site that uses another site's qparams: operators whose inputs share a scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxq.spec import QParams
from torch_frontend.quantizers import Quantizer


class Follower(Quantizer):
    """Quantizes with its leader's qparams; what passes here counts for the leader's range if it contributes.

    It has no qparams and no parameters of its own, so nothing is trained or stored twice.
    """

    name = "follower"
    slots = ()

    def __init__(self, leader: Quantizer, site: str, *, contributes: bool = True) -> None:
        super().__init__(leader.spec, site=site, role=leader.role, observer=leader.observer, target=leader.target)
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
            self._named(lambda: self.leader.observe(x))

    def calc_qparams(self) -> None:
        """The leader calculates."""

    def load_qparams(self, qparams: QParams) -> None:
        """Give the qparams to the leader."""
        self.leader.load_qparams(qparams)

    def qparams(self) -> QParams:
        """The leader's qparams."""
        found: QParams = self._named(self.leader.qparams)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """As any quantizer, with the leader's qparams."""
        if torch.onnx.is_in_onnx_export():
            return self.marked(x)
        if self.observing:
            self.observe(x)
        return self.fake_quantize(x) if self.active and self.calibrated else x

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x on the leader's grid."""
        return self.leader.fake_quantize(x)

    def _read_qparams(self) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.leader._read_qparams()
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> Follower:
        return self
