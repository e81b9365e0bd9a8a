"""Names of calls and sites: conversion changes no value and no module of the user's."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

from tests.torch.nets import Dense, Encoder, Mobile, ResNet, images, settled
from torch_frontend.qmodules import WeightQuantized
from torch_frontend.quant_model import QuantModel


@pytest.mark.parametrize("make", [ResNet, Mobile, Dense])
@pytest.mark.parametrize("target", ["ort", "virtual"])
def test_conversion_changes_no_value_and_no_module_of_the_users(make: type[nn.Module], target: str) -> None:
    torch.manual_seed(0)
    model, x = settled(make()), images()
    before = copy.deepcopy(model.state_dict())
    expected = model(x)
    quantized = QuantModel(model, target=target, example_inputs=x)
    torch.testing.assert_close(quantized(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(isinstance(module, WeightQuantized) for module in model.modules())


def test_parameters_keep_their_names_and_with_copy_false_their_identity() -> None:
    model = settled(ResNet())
    quantized = QuantModel(model, {"target": "virtual", "torch": {"fuse_bn": False}}, copy=False)
    theirs = dict(quantized.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert theirs[name] is parameter
    assert isinstance(quantized.model.get_submodule("layer1.0.conv1"), nn.Conv2d)


def test_sites_are_named_after_modules_and_the_calls_of_one() -> None:
    quantized = QuantModel(settled(ResNet()), target="virtual", example_inputs=images())
    sites = list(quantized.quantizers)
    assert sites[0] == "input:x"
    assert {"layer1.0.relu.out", "layer1.0.relu@1.out", "layer1.0.add.out", "layer1.1.conv2.weight"} <= set(sites)
    assert sites.index("fc.weight") == len(sites) - 1


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.again, self.other.weight = self.conv, self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.again(self.conv(x)))


def test_shared_layers_and_tied_weights_have_one_quantizer_and_a_site_for_each_call() -> None:
    quantized = QuantModel(_Twice(), target="virtual")
    assert list(quantized.quantizers) == ["input:x", "conv.out", "conv@1.out", "conv.weight"]
    assert len({id(m) for m in quantized.modules() if isinstance(m, WeightQuantized)}) == 2
    one, other = quantized.model.get_submodule("conv"), quantized.model.get_submodule("other")
    assert one.weight is other.weight
    assert one.weight_quantizer is other.weight_quantizer


def test_a_tied_embedding_shares_the_quantizer_of_the_head() -> None:
    quantized = QuantModel(Encoder().eval(), target="virtual")
    assert "embed.weight" in quantized.quantizers
    assert "head.weight" not in quantized.quantizers
    assert quantized.model.get_submodule("head").weight is quantized.model.get_submodule("embed").weight


def test_parts_of_a_split_have_sites_of_their_own_and_constants_stay() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            p, q = self.a(x).chunk(2, 1)
            r = functional.interpolate(self.b(p) + self.c(q) * torch.full((1,), 2.0), size=x.shape[2:], mode="bilinear")
            return {"out": r, "q": q}

    model, x = Parts().eval(), images()
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert {"chunk.out0", "chunk.out1"} <= set(quantized.quantizers)
    assert not quantized.refusals
    got, wanted = quantized(x), model(x)
    assert all(torch.equal(got[name], wanted[name]) for name in ("out", "q"))
