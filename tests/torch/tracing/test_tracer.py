"""Tracing: skipped modules, modules that cannot be traced, and the two modes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

from onnxq.errors import ConfigError
from tests.torch.nets import Around, Block, ResNet, images, settled
from torch_frontend.quant_model import QuantModel


def test_skipped_modules_stay_float_and_are_a_decision() -> None:
    config = {"target": "virtual", "torch": {"skip_trace": ["layer1.1", "fc"]}}
    quantized = QuantModel(settled(ResNet()), config, example_inputs=images())
    assert [site for site in quantized.quantizers if site.startswith(("layer1.1", "fc"))] == ["layer1.1.out"]
    assert type(quantized.model.get_submodule("layer1.1")) is Block
    assert [d.subject for d in quantized.decisions if d.rule == "skip-trace"] == ["layer1.1", "fc"]
    assert not quantized.refusals


def test_a_skip_pattern_without_a_module_is_a_typo() -> None:
    with pytest.raises(ConfigError, match=r"layer2.*matches no module"):
        QuantModel(ResNet(), {"target": "virtual", "torch": {"skip_trace": "layer2.*"}})


def test_a_part_that_cannot_be_traced_is_named_and_its_layers_are_quantized() -> None:
    model, x = Around().eval(), torch.randn(3, 16)
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert [(r.subject, "control flow" in r.reason) for r in quantized.refusals] == [("inside", True)]
    inner = [site for site in quantized.quantizers if site.startswith("inside.")]
    assert inner == ["inside.out", "inside.first.in", "inside.second.in", "inside.third.in", "inside.first.weight",
                     "inside.second.weight", "inside.third.weight"]  # fmt: skip


def test_a_subclass_that_computes_something_else_is_looked_into() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return functional.conv2d(x, weight, self.bias, self.stride, self.padding)

    model, x = nn.Sequential(Standardized(3, 4, 3)), images()
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert list(quantized.quantizers) == ["input:input", "0.sub.out"]
    assert torch.equal(quantized(x), model(x))
    quantized.prepare_calibration()
    quantized(x)
    quantized.calc_qparams().set_quant()
    weight = quantized.weights()["0.sub.out"]
    torch.testing.assert_close(weight, model[0].weight - model[0].weight.mean((1, 2, 3), keepdim=True))
    assert not torch.equal(quantized(x), model(x))


class _Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.drop(self.fc(x)), 0.1, self.training)
        return x * 2.0 if self.training else x


def test_a_forward_that_differs_between_train_and_eval_says_so() -> None:
    for mode, lost in ((False, "train"), (True, "eval")):
        (refusal,) = QuantModel(_Modes().train(mode), target="virtual").refusals
        assert (refusal.subject, refusal.rule) == ("_Modes", "mode")
        assert f"other things in {lost} mode" in refusal.reason
    model = settled(ResNet())
    model.bn.train()
    quantized = QuantModel(model, {"target": "virtual", "torch": {"fuse_bn": False}}, copy=False)
    assert not quantized.refusals
    assert (model.training, model.bn.training, model.stem.training) == (False, True, False)
