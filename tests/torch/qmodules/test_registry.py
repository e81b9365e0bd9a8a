"""Users register quantized classes of their own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

from onnxq.errors import ConfigError
from torch_frontend.qmodules import Call, WeightQuantized, register_qmodule
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


class _UsesOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _OwnLayer(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _own(self.layer(x))


def test_users_register_their_own_functions_and_layers() -> None:
    quantized = QuantModel(_UsesOwn(), {"target": "virtual", "torch": {"disable_redundant": False}})
    assert list(quantized.quantizers) == ["input:x", "layer.out", "layer.weight"]
    assert isinstance(quantized.model.get_submodule("_own".strip("_")), _Own)


def test_a_qmodule_for_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="no subclass"):
        register_qmodule(nn.Conv2d, op="conv")(Call)
    with pytest.raises(ConfigError, match="not known"):
        register_qmodule(torch.special.expit, op="sigmod")(Call)
