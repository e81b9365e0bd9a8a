"""Quantizers that cannot leave a marker are named."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.errors import CalibrationError, ModelError, PlanError
from tests.torch.export.kit import ACT, uniform
from tests.torch.exporting import (
    Depthwise,
    quantized,
    wish,
)
from torch_frontend.export import to_onnx
from torch_frontend.quantizers import Uniform
from torch_frontend.quantizers.specs import mark_tensor


def test_an_uncalibrated_quantizer_by_hand() -> None:
    net = nn.Sequential(Uniform(ACT, site="input:x"), nn.ReLU())
    with pytest.raises(CalibrationError, match="input:x: has no scale"):
        to_onnx(net, torch.randn(2, 3))


def test_quantizers_that_are_all_off() -> None:
    model, x = quantized(Depthwise, wish())
    model.set_quant(False, False)
    with pytest.raises(PlanError, match="none of its quantizers is switched on"):
        to_onnx(model, x)


class Lost(nn.Module):
    """Two of its quantizers take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.never, self.idle = uniform("input:x"), uniform("never.out"), uniform("idle.out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        self.idle(x + 1)
        return torch.relu(x)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_quantizer_that_the_graph_lost_is_named(optimize: bool) -> None:
    with pytest.raises(ModelError, match=r"never\.out: quantizes nothing .* holds for idle\.out"):
        to_onnx(Lost(), torch.randn(2, 3), optimize=optimize)


def test_two_quantizers_with_one_site() -> None:
    net = nn.Sequential(uniform("same"), nn.ReLU(), uniform("same"))
    with pytest.raises(ModelError, match="same: two quantizers have this site"):
        to_onnx(net, torch.randn(2, 3))


class Doubling(Uniform):
    """A user's quantizer that leaves a second marker, with a site nobody knows."""

    def marked(self, x: Tensor) -> Tensor:
        return mark_tensor(super().marked(x), *self._read_qparams(), self.spec, site="somewhere", role=self.role)


def test_a_marker_whose_site_is_unknown() -> None:
    strange = Doubling(ACT, site="input:x")
    strange.calc_qparams_with_minmax(-1, 1)
    with pytest.raises(ModelError, match="somewhere: is marked in the graph, and the model has no such quantizer"):
        to_onnx(nn.Sequential(strange, nn.ReLU()), torch.randn(2, 3))
