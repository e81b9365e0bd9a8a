"""Batch norms, modules and functions, fold into the layer in front where nobody sees the difference, or train."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch import Tensor, nn

from torch_frontend.quant_model import QuantModel
from torch_frontend.tracing.batch_norms import BatchNorm


class _After(nn.Module):
    """A layer and its batch norm."""

    def __init__(self, layer: nn.Module, norm: nn.Module, call=lambda m, x: m.norm(m.layer(x))) -> None:
        super().__init__()
        self.layer, self.norm, self.call = layer, norm, call
        generator = torch.Generator().manual_seed(0)
        if norm.running_mean is not None:
            norm.running_mean.copy_(torch.randn(norm.num_features, generator=generator))
            norm.running_var.copy_(0.1 + torch.rand(norm.num_features, generator=generator))
        if norm.affine:
            with torch.no_grad():
                norm.weight.copy_(torch.randn(norm.num_features, generator=generator))
                norm.bias.copy_(torch.randn(norm.num_features, generator=generator))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


FOLDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: _After(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), (2, 4, 8, 8)),
    "conv without bias": (lambda: _After(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), (2, 4, 8, 8)),
    "conv in groups": (lambda: _After(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (2, 4, 8, 8)),
    "conv 1d": (lambda: _After(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 8)),
    "conv 3d": (lambda: _After(nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6)), (2, 4, 5, 5, 5)),
    "not affine": (lambda: _After(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), (2, 4, 8, 8)),
    "transposed": (lambda: _After(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)), (2, 4, 8, 8)),
    "transposed in groups": (lambda: _After(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (2, 4, 8, 8)),
    "linear": (lambda: _After(nn.Linear(4, 6), nn.BatchNorm1d(6)), (5, 4)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_batch_norm_folds_without_a_difference(name: str) -> None:
    make, shape = FOLDED[name]
    model, x = make(), torch.randn(shape, generator=torch.Generator().manual_seed(2))
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert [(d.subject, d.reason) for d in quantized.decisions] == [("norm", "folded into layer")]
    assert not any("Norm" in type(module).__name__ for module in quantized.modules())
    torch.testing.assert_close(quantized(x), model(x), rtol=1e-5, atol=1e-5)


def _conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


def _tied() -> nn.Module:
    net = _After(_conv(), nn.BatchNorm2d(4), lambda m, x: m.other(m.norm(m.layer(x))))
    net.other = _conv()
    net.other.weight = net.layer.weight
    return net


UNSAFE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "read twice": (lambda: _After(_conv(), nn.BatchNorm2d(4), lambda m, x: m.norm(y := m.layer(x)) + y), (2, 4, 8, 8),
                   "others read"),
    "called twice": (lambda: _After(_conv(), nn.BatchNorm2d(4), lambda m, x: m.norm(m.layer(m.layer(x)))),
                     (2, 4, 8, 8), "more than once"),
    "tied": (_tied, (2, 4, 8, 8), "another layer's too"),
    "no statistics": (lambda: _After(_conv(), nn.BatchNorm2d(4, track_running_stats=False)), (2, 4, 8, 8),
                      "no running statistics"),
    "linear over positions": (lambda: _After(nn.Linear(4, 6), nn.BatchNorm1d(6)), (2, 6, 4), "features"),
    "linear without an example": (lambda: _After(nn.Linear(4, 6), nn.BatchNorm1d(6)), (), "example_inputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
def test_a_batch_norm_that_others_would_miss_stays(name: str) -> None:
    make, shape, why = UNSAFE[name]
    model, x = make(), torch.randn(shape or (5, 4))
    quantized = QuantModel(model, target="virtual", example_inputs=x if shape else None)
    (decision,) = [d for d in quantized.decisions if d.rule == "fuse-bn"]
    assert decision.subject == "norm"
    assert why in decision.reason
    assert torch.equal(quantized(x), model(x))


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
    (fold,) = [(d.subject, d.reason) for d in model.decisions if d.rule == "fuse-bn"]
    assert fold == ("1.batch_norm", "folded into 0")
    assert not any("Norm" in type(module).__name__ for module in model.modules())
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
    told = [(d.subject, "has False for `training`" in d.reason) for d in model.decisions if d.rule == "batch-norm"]
    assert told == [("1.batch_norm", True)]
    torch.testing.assert_close(model(images(1)), net(images(1)))
    assert torch.equal(net[1].mean, reference.running_mean)


def test_a_frozen_batch_norm_keeps_its_mode(reference: nn.BatchNorm2d) -> None:
    net = settled(NormAct(8), reference).train()
    net[1].eval()
    model = QuantModel(net, {"target": "virtual", "torch": {"fuse_bn": False}}, example_inputs=images(0))
    torch.testing.assert_close(model(images(1)), net(images(1)))
    # As a module, not as a function.
    assert not [d for d in model.decisions if d.rule == "batch-norm"]
