"""torch.onnx.export with markers: quantizers by hand are found again; those that leave no marker are named."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

import onnxq
from onnxq.errors import CalibrationError, ModelError, PlanError
from onnxq.sites import Role, TensorId
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.exporting import Depthwise, assert_same, ort_run, quantized, wish
from tests.torch.nets import Network
from torch_frontend import qat
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import Quantizer, Uniform, quantizers_of
from torch_frontend.quantizers.specs import mark_tensor

ACT = QuantSpec(bits=8, signed=False, symmetric=False)


def uniform(site: str, lo: Any = -2.0, hi: Any = 2.0, spec: QuantSpec = ACT, role: Role = Role.ACTIVATION) -> Uniform:
    made = Uniform(spec, site=site, role=role)
    made.calc_qparams_with_minmax(lo, hi)
    return made


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
        self.tied_rows = weighted("table.rows", self.table)
        self.tied_whole = weighted("table.columns", self.table, axis=1)
        self.x, self.inner = uniform("input:x"), uniform("conv.in", -4, 4)
        self.left, self.right = uniform("add.left", -3, 3), uniform("add.right", -5, 5)
        self.sum = uniform("add.out", -8, 8)
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
    assert [site.group for site in exported.plan.sites if "conv.in" in site.reason] == ["conv.in", "conv.in"]
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


def test_what_torch_cannot_export_is_said_in_its_words() -> None:
    """Control flow on values, which torch.export refuses."""
    model = nn.Sequential(uniform("input:x"), Network(lambda _, x: x if x.sum() > 0 else -x))
    with pytest.raises(ModelError, match=r"Sequential: torch\.onnx\.export failed.*\[Q122\]"):
        to_onnx(model, torch.randn(2, 3))
    assert all(isinstance(q, Quantizer) and "marked_scale" not in q._buffers for q in quantizers_of(model))


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return self.inner(parts["a"]) + x * parts["b"]


def test_a_dict_as_the_last_argument_is_one_argument() -> None:
    x = torch.randn(2, 8)
    batch = (x, {"a": x + 1, "b": x * 2})
    model = QuantModel(Keyed().eval(), "virtual-int8", example_inputs=batch)
    with qat.observing(model):
        model(*batch)
    done = to_onnx(model.freeze(), batch, dynamic_batch=True)
    assert [value.type.tensor_type.shape.dim[0].dim_param != "" for value in done.model.graph.input] == [True] * 3


def test_an_uncalibrated_quantizer_by_hand() -> None:
    net = nn.Sequential(Uniform(ACT, site="input:x"), nn.ReLU())
    with pytest.raises(CalibrationError, match="input:x: has no scale"):
        to_onnx(net, torch.randn(2, 3))


def test_quantizers_that_are_all_off() -> None:
    model, x = quantized(Depthwise, wish())
    model.set_quant(False, False)
    with pytest.raises(PlanError, match="none of its quantizers is switched on"):
        to_onnx(model, x)


def lose_two(network: Any, x: Tensor) -> Tensor:
    """A forward in which two of its quantizers take no part."""
    x = network.x(x)
    network.idle(x + 1)
    return torch.relu(x)


def test_a_quantizer_that_the_graph_lost_and_two_with_one_site_are_named() -> None:
    lost = Network(lose_two, x=uniform("input:x"), never=uniform("never.out"), idle=uniform("idle.out"))
    for optimize in (True, False):
        with pytest.raises(ModelError, match=r"never\.out: quantizes nothing .* holds for idle\.out"):
            to_onnx(lost, torch.randn(2, 3), optimize=optimize)
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
