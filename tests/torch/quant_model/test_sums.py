"""Weights of target ort keep 16-bit sums in torch as they do in numpy, through training, reconstruction and export."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from onnxq import numerics
from onnxq.numerics import SumOrder, find_saturating_sums
from onnxq.plan.names import name_part
from onnxq.sites import Role
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.exporting import Depthwise, Residual, assert_same, wish
from tests.torch.nets import Network, calibrate, take_step
from torch_frontend.export import Exported, to_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import AdaRound, PostStep, create_quantizer
from torch_frontend.reconstruct import Settings, reconstruct

W8 = QuantSpec(bits=8, granularity=PerChannel(0))


class Products(nn.Module):
    """Every operator that has a weight, in the ways that people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.deep = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped, self.wide = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 16, 1, groups=8)
        self.called, self.called_deep = nn.Parameter(torch.randn(8, 16, 1, 1)), nn.Parameter(torch.randn(8, 1, 3, 3))
        self.up = nn.ConvTranspose2d(8, 8, 1)
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 5))
        self.turned = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.grouped(self.deep(self.dense(x.relu()).relu()).relu())).relu()
        x = functional.conv2d(x, self.called).relu()
        x = self.up(functional.conv2d(x, self.called_deep, None, 1, 1, 1, 8).relu())
        x = self.linear(x.mean((2, 3))).relu() @ self.table
        return functional.linear(x.relu(), self.turned)


def branch(network: Any, x: Tensor) -> Tensor:
    """A forward that cannot be traced."""
    x = network.deep(network.conv(x))
    if x.sum() > 0:
        x = x * 2
    return network.fc(x.mean((2, 3)))


EVERYWHERE = {"rules": [{"op": "*", "set": {"quantize": True}}]}


def _orders(model: QuantModel) -> dict[str, tuple[SumOrder, ...]]:
    return {site: q.sum_orders(planned=True) for site, q in model.quantizers.items() if q.role is Role.WEIGHT}


def test_sums_are_those_of_the_target_s_kernels() -> None:
    x = torch.randn(2, 8, 6, 6)
    conv = ((0, 2, 3, 1),)
    assert _orders(QuantModel(Products(), {"target": "ort", **EVERYWHERE}, example_inputs=x)) == {
        **dict.fromkeys(("dense.weight", "grouped.weight", "wide.weight", "called"), conv),
        **dict.fromkeys(("deep.weight", "called_deep"), ()),
        **dict.fromkeys(("linear.weight", "turned"), ((0, 1),)),
        "table": ((1, 0),),
    }
    line = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3))
    model = QuantModel(line, {"target": "ort", **EVERYWHERE}, example_inputs=torch.randn(2, 4, 9))
    assert _orders(model) == dict.fromkeys(("0.weight", "2.weight"), ((0, 2, 1),))
    untraced = Network(branch, conv=nn.Conv2d(4, 4, 3), deep=nn.Conv2d(4, 4, 3, groups=4), fc=nn.Linear(4, 4))
    model = QuantModel(untraced, {"target": "ort"}, example_inputs=torch.randn(2, 4, 6, 6))
    assert not model.traced
    assert _orders(model) == {"conv.weight": conv, "deep.weight": (), "fc.weight": ((0, 1),)}


@pytest.mark.parametrize(
    "config",
    [
        "trt-int8",
        "virtual-int8",
        "ort-int8-weights",
        {"target": "ort", "weights": {"bits": 7}, **EVERYWHERE},
        {"target": "ort", "activations": {"bits": 16}, **EVERYWHERE},
    ],
)
def test_nothing_is_bound_where_kernels_are_exact(config: Any) -> None:
    model = QuantModel(Residual(), config, example_inputs=torch.randn(1, 3, 8, 8))
    assert set(_orders(model).values()) == {()}


def test_sums_are_kept_while_activations_are_quantized() -> None:
    model, _ = _model(Residual, wish(8, "channel", "ort"))
    twin = copy.deepcopy(model)
    quantizer = model.quantizers["conv.weight"]
    assert quantizer.sum_orders()
    model.set_quant(activations=False)
    assert not quantizer.sum_orders()
    assert quantizer.sum_orders(planned=True)
    model.disable("*relu*")
    assert not quantizer.sum_orders(planned=True)
    assert twin.quantizers["conv.weight"].sum_orders()


def _narrow(model: QuantModel) -> int:
    """Take back the room that calibration gave to sums; returns how many then overflow."""
    found = 0
    for site, weight in model.weights().items():
        quantizer = model.quantizers[site]
        if quantizer.sum_orders():
            numbers = quantizer.qparams()
            quantizer.load_qparams(replace(numbers, scale=numbers.scale / np.float32(1.6)))
        integers = numerics.quantize(quantizer.bake(weight).detach().numpy(), quantizer.qparams(), quantizer.spec)
        found += sum(int(find_saturating_sums(integers, order).sum()) for order in quantizer.sum_orders())
    return found


def _model(make: Callable[[], nn.Module], config: dict[str, Any], seed: int = 1) -> tuple[QuantModel, Tensor]:
    """A calibrated model whose weights fill their range evenly, so that many sums overflow, and inputs."""
    torch.manual_seed(seed)
    net = make()
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            nn.init.uniform_(parameter, -0.5, 0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    x = torch.rand(8, 3, 8, 8)
    return calibrate(QuantModel(net.eval(), config, example_inputs=x), x).set_quant(), x


def _stored(exported: Exported) -> dict[str, Any]:
    """Tensor -> the integers of its weight in the file."""
    names = {name_part(site.site, "quantized"): site.tensor for site in exported.plan.sites if site.role is Role.WEIGHT}
    found = {t.name: numpy_helper.to_array(t) for t in exported.model.graph.initializer}
    return {tensor: found[name] for name, tensor in names.items()}


def _export_kept(model: nn.Module, x: Tensor, count: int) -> None:
    """The file is the model; `count` weights have sums to keep, and their integers in the file do."""
    exported = to_onnx(model, x, target="ort")
    assert_same(model, exported, x)
    bound = [site for site in exported.plan.sites if site.sum_orders]
    stored = _stored(exported)
    assert len(bound) == count
    for site in bound:
        assert stored[site.tensor].dtype == np.int8
        assert not any(find_saturating_sums(stored[site.tensor], order).any() for order in site.sum_orders), site.site
    assert not exported.plan.warnings


def test_scales_are_wide_enough_for_the_sums() -> None:
    model, _ = _model(Residual, wish(8, "channel", "ort"))
    for site, weight in model.weights().items():
        quantizer = model.quantizers[site]
        orders = quantizer.sum_orders()
        wanted = numerics.weight_qparams(weight.detach().numpy(), quantizer.spec, orders=orders)
        np.testing.assert_array_equal(quantizer.qparams().scale, wanted.scale)
        assert (wanted.scale > numerics.weight_qparams(weight.detach().numpy(), quantizer.spec).scale).any()


# All kinds of quantizers with sums to keep: tests/torch/test_matrix.py.
@pytest.mark.parametrize("quantizer", ["uniform", {"name": "lsq", "init": "observer"}], ids=["uniform", "lsq"])
def test_what_is_trained_is_what_is_exported(quantizer: Any) -> None:
    model, x = _model(Residual, wish(8, "channel", "ort", weights={"quantizer": quantizer}))
    assert _narrow(model) > 10
    model.init_qat()
    free = {site: q for site, q in model.quantizers.items() if q.role is Role.WEIGHT and q.sum_orders()}
    assert set(free) == {"conv.weight", "fc.weight"}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    PostStep(model).attach(optimizer)
    for _ in range(2):
        take_step(optimizer, model(x).square().mean())
    weights = model.weights()
    assert all(weights[site].grad is not None and weights[site].grad.abs().sum() > 0 for site in free)
    _export_kept(model.freeze(), x, 2)


@pytest.mark.parametrize("method", ["adaround", "brecq"])
def test_learned_roundings_keep_sums(method: str) -> None:
    model, x = _model(Depthwise, wish(8, "channel", "ort"))
    assert _narrow(model) > 5
    quick = Settings(iterations=60, batch=8, samples=8, lr=0.05, warm_up=0.1)
    found = reconstruct(model, [x], method, settings=quick)
    assert any(unit.kept for unit in found.units)
    learned = {site: q for site, q in model.quantizers.items() if isinstance(q, AdaRound) and q.sum_orders()}
    assert set(learned) == {"project.weight", "head.weight"}
    for site, quantizer in learned.items():
        weight = model.weights()[site].detach()
        numbers = quantizer.qparams()
        integers = numerics.quantize(quantizer(weight).detach().numpy(), numbers, quantizer.spec)
        assert not any(find_saturating_sums(integers, order).any() for order in quantizer.sum_orders())
    _export_kept(model.freeze(), x, 2)


def test_soft_rounding_stays_inside_and_hard_rounding_gives_the_nearest() -> None:
    torch.manual_seed(2)
    w = torch.empty(4, 9).uniform_(-1, 1)
    quantizer = create_quantizer("adaround", W8, site="w", role=Role.WEIGHT)
    data = create_quantizer("uniform", QuantSpec(signed=False, symmetric=False), site="x")
    quantizer.bind_sums((0, 1), data)
    quantizer.calc_qparams_with_minmax(w.amin(1), w.amax(1))
    v = quantizer.start_learning(w)
    v.data.add_(torch.randn(v.shape))
    scale = quantizer.scale[:, None]
    soft = quantizer(w) / scale
    first, second = soft[:, 0:8:2], soft[:, 1:8:2]
    assert (first.clamp(min=0) + second.clamp(min=0)).max() <= 128.001
    assert (first.clamp(max=0) + second.clamp(max=0)).min() >= -128.001
    soft.square().sum().backward()
    assert v.grad.isfinite().all()
    up = (v.detach() >= 0).numpy()
    quantizer.stop_learning()
    ratio = (w / scale).numpy()
    chosen = np.clip(np.floor(ratio) + up, -128, 127).astype(np.int8)
    wanted = numerics.limit_sums(chosen, ratio, [(0, 1)])
    assert (wanted != chosen).any()
    np.testing.assert_array_equal(quantizer.bake(w).numpy(), wanted.astype(np.float32) * scale.numpy())
    assert torch.equal(quantizer(w), quantizer.bake(w))


def test_saturation_that_is_allowed_leaves_the_bits_of_before() -> None:
    model, x = _model(Residual, {**wish(8, "channel", "ort"), "saturation": "allow"})
    assert set(_orders(model).values()) == {()}
    for site, weight in model.weights().items():
        quantizer, plain = model.quantizers[site], weight.detach().numpy()
        numbers = numerics.weight_qparams(plain, quantizer.spec)
        wanted = numerics.fake_quant(plain, numbers, quantizer.spec)
        np.testing.assert_array_equal(quantizer(weight).detach().numpy(), wanted)
    exported = to_onnx(model.freeze(), x)
    assert exported.plan.saturation == "allow"
    assert [line for line in exported.plan.warnings if line.startswith("saturation: allow")]
    stored = [value for value in _stored(exported).values() if value.ndim == 4]
    assert any(find_saturating_sums(value, (0, 2, 3, 1)).any() for value in stored)
    assert_same(model, exported, x)


class ByHand(nn.Linear):
    """A layer whose quantizers nobody told of sums."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        nn.init.uniform_(self.weight, -1, 1)
        self.seen = create_quantizer("uniform", QuantSpec(signed=False, symmetric=False), site="fc.in")
        self.rounded = create_quantizer("uniform", W8, site="fc.weight", role=Role.WEIGHT)
        self.seen.calc_qparams_with_minmax(0, 1)
        self.rounded.calc_qparams_with_minmax(self.weight.amin(1), self.weight.amax(1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.seen(x), self.rounded(self.weight), self.bias)


def test_weights_that_the_export_moves_are_named() -> None:
    torch.manual_seed(0)
    layer, x = ByHand().eval(), torch.rand(3, 8)
    (line,) = to_onnx(layer, x, target="ort").plan.warnings
    assert line.startswith("fc.weight: ")
    assert "other integers than training had" in line
    layer.rounded.bind_sums((0, 1), layer.seen)
    _export_kept(layer, x, 1)
    (line,) = to_onnx(layer, x, target="virtual").plan.warnings
    assert line.startswith("fc.weight: kept 16-bit sums in training")
