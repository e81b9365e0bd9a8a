"""torch.onnx.export with markers, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

import onnxq
from onnxq.errors import ModelError
from onnxq.sites import Role, TensorId
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.export.kit import uniform
from tests.torch.exporting import (
    assert_same,
    ort_run,
)
from torch_frontend.export import to_onnx
from torch_frontend.quantizers import Quantizer, Uniform, quantizers_of


def weighted(site: str, weight: Tensor, bits: int = 8, axis: int = 0) -> Uniform:
    rows = weight.detach().movedim(axis, 0).flatten(1)
    spec = QuantSpec(bits=bits, granularity=PerChannel(axis))
    return uniform(site, rows.amin(1), rows.amax(1), spec, Role.WEIGHT)


class ByHand(nn.Module):
    """Quantizers set by hand in a model that torch.fx cannot trace, with most difficulties of identity.

    A layer called twice, a weight read by two layers, an add of one tensor to itself, two quantizers on one tensor,
    quantized inputs and outputs, and a branch on a shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.table = nn.Parameter(torch.randn(6, 3))
        self.wq = weighted("conv.weight", self.conv.weight)
        self.tied_rows, self.tied_whole = (
            weighted("table.rows", self.table),
            weighted("table.columns", self.table, axis=1),
        )
        self.x, self.inner = uniform("input:x"), uniform("conv.in", -4, 4)
        self.left, self.right, self.sum = (
            uniform("add.left", -3, 3),
            uniform("add.right", -5, 5),
            uniform("add.out", -8, 8),
        )
        self.y = uniform("output:y", -9, 9)
        self.unused = uniform("unused")
        self.unused.disabled_reason = "for the test"

    def step(self, x: Tensor) -> Tensor:
        return functional.conv2d(self.inner(x), self.wq(self.conv.weight), self.conv.bias, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        x = self.step(functional.relu(self.step(x)))
        if x.shape[-1] > 2:
            x = self.sum(self.left(x) + self.right(x))
        rows = self.tied_rows(self.table)[torch.tensor([1, 4, 5])]
        return self.y(functional.linear(x.mean((2, 3)) @ rows, self.tied_whole(self.table)))


@pytest.fixture(scope="module")
def by_hand() -> tuple[ByHand, Tensor]:
    torch.manual_seed(3)
    return ByHand().eval(), 1.5 * torch.randn(2, 3, 6, 6)


@pytest.mark.parametrize("optimize", [True, False])
def test_identity_is_found_however_torch_writes_the_graph(by_hand: tuple[ByHand, Tensor], optimize: bool) -> None:
    model, x = by_hand
    exported = to_onnx(model, x, target="virtual", optimize=optimize)
    assert "unused" not in exported.sites
    assert len(exported.sites["conv.in"]) == 2
    assert exported.sites["input:x"] == (TensorId("x"),)
    groups = [site.group for site in exported.plan.sites if "conv.in" in site.reason]
    assert groups == ["conv.in", "conv.in"]
    out = next(site for site in exported.plan.sites if site.reason == "quantizer output:y")
    assert out.role is Role.OUTPUT
    assert_same(model, exported, x)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_plain_torch_export_leaves_the_markers_too(by_hand: tuple[ByHand, Tensor]) -> None:
    model, x = by_hand
    first = to_onnx(model, x, target="virtual")
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    marked = onnxq.strip_markers(program.model_proto, target="virtual")
    assert set(marked.sites) == set(first.sites)
    again = onnxq.apply(marked.model, marked.plan).model
    name = first.model.graph.output[0].name
    np.testing.assert_array_equal(ort_run(again, x, [])[again.graph.output[0].name], ort_run(first.model, x, [])[name])


class Flowing(nn.Module):
    """Control flow on values, which torch.export refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.x = uniform("input:x")

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        return x if x.sum() > 0 else -x


def test_what_torch_cannot_export_is_said_in_its_words() -> None:
    model = Flowing()
    with pytest.raises(ModelError, match=r"Flowing: torch\.onnx\.export failed"):
        to_onnx(model, torch.randn(2, 3))
    assert all(isinstance(q, Quantizer) and "marked_scale" not in q._buffers for q in quantizers_of(model))
