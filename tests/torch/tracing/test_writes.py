"""Forwards that write into parts of tensors or into their buffers, or draw numbers: the graph does what they do."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from tests.torch.nets import calibrate
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.tracing.tracer import GraphOrigin

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    """Two convolutions around `between`, the first with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.last = nn.Conv2d(8, 3, 1)
        self.register_buffer("mean", torch.zeros(8, 1, 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("state", torch.zeros(2, 8, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Parts(Base):
    """Parts of a tensor are written, as networks that shift channels and heads that decode boxes do."""

    def between(self, y: Tensor) -> Tensor:
        y[:, :4] = y[:, 4:] * 2
        y[..., 0] += 1
        return y


class View(Base):
    """A view is written, and the tensor read behind it."""

    def between(self, y: Tensor) -> Tensor:
        y.view(y.shape[0], 8, -1).mul_(2)
        return y + 1


class Averages(Base):
    """An average in a buffer, and a counter."""

    def between(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean((0, 2, 3))[:, None, None])
            self.steps += 1
        return y - self.mean


class State(Base):
    """A buffer is set to a new tensor, which the next call reads."""

    def between(self, y: Tensor) -> Tensor:
        self.state = (y + 0.5 * self.state).detach()
        return torch.tanh(self.state)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("kind", "buffers"), [(Parts, []), (View, []), (Averages, ["mean", "steps"]), (State, ["state"])]
)
def test_writes_are_those_of_the_forward(kind: type[Base], buffers: list[str], train: bool) -> None:
    torch.manual_seed(0)
    net = kind().train(train)
    model = QuantModel(net, {"target": "virtual", "torch": {"fuse_bn": False}}, example_inputs=X)
    assert model.origin is GraphOrigin.EXPORTED
    assert all(product.reason is None for product in model.products)
    assert float(net.state.abs().max()) == int(net.steps) == 0
    for batch in (X, X.flip(0)):
        wanted, got = net(batch), model(batch)
        assert torch.allclose(got, wanted, atol=1e-5)
        for name in ("first.1.running_mean", *buffers):
            assert torch.allclose(model.model.get_buffer(name), net.get_buffer(name), atol=1e-5), name
    model(X).sum().backward()
    assert model.model.get_parameter("last.weight").grad is not None


@pytest.mark.parametrize("kind", [Parts, View])
def test_written_parts_are_exported(kind: type[Base]) -> None:
    torch.manual_seed(0)
    model = calibrate(QuantModel(kind().eval(), "virtual-int8", example_inputs=X), X)
    pairs = to_onnx(model.freeze(), X).plan.sites
    assert {"first.0.weight", "last.weight"} <= {pair.site.name for pair in pairs}


class Counting(Base):
    def between(self, y: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        return y


def test_a_write_in_one_mode_only_is_kept_in_it_and_reported() -> None:
    model = QuantModel(Counting(), "virtual-int8", example_inputs=X)
    assert [refusal.rule for refusal in model.refusals] == ["mode"]
    model(X)
    model(X)
    assert int(model.model.get_buffer("steps")) == 2
    # Traced in the other mode, the graph does not have it.
    assert [r.rule for r in QuantModel(Counting().eval(), "virtual-int8", example_inputs=X).refusals] == ["mode"]


class Noisy(Base):
    def between(self, y: Tensor) -> Tensor:
        return y + torch.randn(2, 8, 6, 6)


def test_random_numbers_are_drawn_in_every_run() -> None:
    model = QuantModel(Noisy().eval(), "virtual-int8", example_inputs=X)
    assert not torch.equal(model(X), model(X))


class Branching(Base):
    def between(self, y: Tensor) -> Tensor:
        return y * 2 if y.sum() > 0 else y


def test_a_forward_that_nothing_captures_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = QuantModel(Branching().eval(), "virtual-int8", example_inputs=X)
    assert model.origin is GraphOrigin.LAYERS
    assert capfd.readouterr() == ("", "")
