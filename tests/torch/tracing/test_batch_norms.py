"""Batch norms written as functions are folded and trained as nn.BatchNorm2d is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor, nn

from torch_frontend.quant_model import QuantModel
from torch_frontend.tracing.batch_norms import BatchNorm


class NormAct(nn.BatchNorm2d):
    """A batch norm and an activation with a forward of its own, as timm writes it."""

    def __init__(self, width: int, momentum: float | None = 0.1) -> None:
        super().__init__(width, momentum=momentum)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, factor, self.eps
        )  # fmt: skip
        return self.act(self.drop(x))


class Plain(nn.Module):
    """A batch norm by hand, whose tensors have names of their own. mode: None: that of the module."""

    def __init__(self, width: int, mode: bool | None = None) -> None:
        super().__init__()
        self.scale, self.shift, self.mode = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), mode
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mode = self.training if self.mode is None else self.mode
        return torch.relu(torch.batch_norm(x, self.scale, self.shift, self.mean, self.var, mode, 0.1, 1e-5, False))


def settled(norm: nn.Module, reference: nn.BatchNorm2d) -> nn.Module:
    """A convolution and this norm, with the numbers of `reference`."""
    for mine, theirs in (("scale", "weight"), ("shift", "bias"), ("mean", "running_mean"), ("var", "running_var")):
        name = mine if hasattr(norm, mine) else theirs
        getattr(norm, name).data.copy_(getattr(reference, theirs).data)
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm)


@pytest.fixture
def reference() -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):
        tensor.normal_(0.5, 0.3)
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, Any] = {
    "norm and activation": lambda: NormAct(8),
    "averages of all batches": lambda: NormAct(8, momentum=None),
    "names of its own": lambda: Plain(8),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_functional_batch_norm_folds(kind: str, train: bool, reference: nn.BatchNorm2d) -> None:
    net = settled(KINDS[kind](), reference).train(train)
    before = copy.deepcopy(net.state_dict())
    model = QuantModel(net, target="virtual", example_inputs=images(0))
    assert [(d.subject, d.reason) for d in model.decisions if d.rule == "fuse-bn"] == [
        ("1.batch_norm", "folded into 0")
    ]
    assert not any("Norm" in type(module).__name__ for module in model.modules())
    assert set(model.quantizers) == {"input:input", "0.weight", *(q for q in model.quantizers if "out" in q)}
    torch.testing.assert_close(model.eval()(images(1)), net.eval()(images(1)), rtol=1e-4, atol=1e-5)
    # A trace in train mode counts no batch.
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert len(list(model.parameters())) == 2
    assert not model.refusals


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_functional_batch_norm_trains(kind: str, train: bool, reference: nn.BatchNorm2d) -> None:
    config = {"target": "virtual", "torch": {"fuse_bn": False}}
    net = settled(KINDS[kind](), reference).train(train)
    twin = nn.Sequential(copy.deepcopy(net[0]), copy.deepcopy(reference), nn.ReLU())
    twin[1].momentum = getattr(net[1], "momentum", 0.1)
    model = QuantModel(net, config, example_inputs=images(0)).train()
    for seed in (1, 2):
        torch.testing.assert_close(model(images(seed)), twin(images(seed)))
    (norm,) = [module for module in model.modules() if isinstance(module, BatchNorm)]
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norm, name), getattr(twin[1], name))
        assert not torch.equal(getattr(norm, name), getattr(reference, name))
    torch.testing.assert_close(model.eval()(images(3)), twin.eval()(images(3)))
    # Each tensor is there once.
    assert len(model.state_dict()) - len(model.quantizers) <= len(twin.state_dict()) + 2


def test_one_that_is_frozen_for_good_stays_a_function_and_says_so(reference: nn.BatchNorm2d) -> None:
    net = settled(Plain(8, mode=False), reference)
    model = QuantModel(net, target="virtual", example_inputs=images(0)).train()
    assert [(d.subject, "has False for `training`" in d.reason) for d in model.decisions if d.rule == "batch-norm"] == [
        ("1.batch_norm", True)
    ]
    torch.testing.assert_close(model(images(1)), net(images(1)))
    assert torch.equal(net[1].mean, reference.running_mean)


def test_a_frozen_batch_norm_keeps_its_mode(reference: nn.BatchNorm2d) -> None:
    net = settled(NormAct(8), reference).train()
    net[1].eval()
    model = QuantModel(net, {"target": "virtual", "torch": {"fuse_bn": False}}, example_inputs=images(0))
    torch.testing.assert_close(model(images(1)), net(images(1)))


def test_timm_s_norm_and_activation() -> None:
    layers = pytest.importorskip("timm.layers", reason="timm is not installed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), layers.BatchNormAct2d(8)).train()
    net(images(0))
    model = QuantModel(net, target="virtual", example_inputs=images(0))
    assert [d.reason for d in model.decisions if d.rule == "fuse-bn"] == ["folded into 0"]
    torch.testing.assert_close(model.eval()(images(1)), net.eval()(images(1)), rtol=1e-4, atol=1e-5)
