"""Layers of users' own classes, and layers with a computed weight: weight norms become plain, others are refused."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from onnxq.errors import ConfigError
from onnxq.sites import Role
from tests.torch.nets import Network
from torch_frontend.qmodules import Call, WeightQuantized, find_entry, register_qmodule
from torch_frontend.quant_model import QuantModel


def _own(x: Tensor) -> Tensor:
    return torch.special.expit(x) * x


@register_qmodule(_own, op="silu")
class _Own(Call):
    """A function of the user's own, with its entry."""


class _OwnLayer(nn.Linear):
    pass


@register_qmodule(_OwnLayer, op="linear")
class _QOwnLayer(WeightQuantized, _OwnLayer):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.quantized_weight(), self.bias)


torch.fx.wrap("_own")


def test_users_register_their_own_functions_and_layers() -> None:
    net = Network(lambda m, x: _own(m.layer(x)), layer=_OwnLayer(4, 4))
    quantized = QuantModel(net, {"target": "virtual", "torch": {"disable_redundant": False}})
    assert list(quantized.quantizers) == ["input:x", "layer.out", "layer.weight"]
    assert isinstance(quantized.model.get_submodule("_own".strip("_")), _Own)


def test_a_qmodule_for_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="no subclass"):
        register_qmodule(nn.Conv2d, op="conv")(Call)
    with pytest.raises(ConfigError, match="not known"):
        register_qmodule(torch.special.expit, op="sigmod")(Call)


X = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))


class Positions(nn.Module):
    """A convolution with a weight norm along its last axis, as in wav2vec 2.0, and a batch norm behind it."""

    def __init__(self, norm: Callable[..., nn.Module], branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = norm(nn.Conv1d(4, 6, 3, padding=1))
        self.norm, self.branch = nn.BatchNorm1d(6), branch
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.branch and y.sum() > 1e9:
            y = -y
        return y.relu()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, weight_norm])
def test_a_weight_norm_becomes_a_plain_weight(norm: Callable[..., nn.Module], branch: bool) -> None:
    net = Positions(lambda layer: norm(layer, dim=2), branch)
    wanted, names = net(X), set(net.state_dict())
    model = QuantModel(net, target="virtual", example_inputs=X, copy=False)
    assert model.traced is not branch
    assert [(d.subject, d.rule) for d in model.decisions][:1] == [("conv", "weight-norm")]
    assert [site for site, q in model.quantizers.items() if q.role is Role.WEIGHT] == ["conv.weight"]
    torch.testing.assert_close(model(X), wanted)
    model(X).square().sum().backward()
    assert model.weights()["conv.weight"].grad is not None
    # The given module stays as it was.
    assert set(net.state_dict()) == names
    torch.testing.assert_close(net.eval()(X), wanted)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + w.flip(-1)


COMPUTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "shifted": lambda layer: parametrize.register_parametrization(layer, "bias", nn.Softplus(), unsafe=True),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "spectral norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("norm", COMPUTED.values(), ids=COMPUTED)
def test_other_computed_weights_stay_float_and_say_why(norm: Callable[..., nn.Module]) -> None:
    net = Positions(norm)
    model = QuantModel(net, target="virtual", example_inputs=X)
    (refusal,) = model.refusals
    assert (refusal.subject, refusal.code) == ("conv", "R110")
    assert "its weight is computed" in refusal.reason
    assert "conv.weight" not in model.quantizers
    assert torch.equal(model(X), net(X))


def test_a_parametrized_layer_is_registered_as_its_own_class() -> None:
    assert find_entry(type(COMPUTED["symmetric"](nn.Conv1d(2, 2, 1)))) is find_entry(nn.Conv1d)
