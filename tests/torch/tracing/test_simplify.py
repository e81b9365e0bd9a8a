"""Rewrites of a new graph: in-place writes and dropouts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn import functional

from tests.torch.nets import images
from torch_frontend.quant_model import QuantModel


class _Writes(nn.Module):
    """In-place activations whose input is read again, as pre-activation networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.conv = nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        y = self.conv(self.relu(x))
        z = functional.relu(y, inplace=True)
        y = y + x
        y.clamp_(max=1.0)
        return y + z


def test_what_an_in_place_call_wrote_is_what_later_readers_get() -> None:
    model, x = _Writes(), images()
    expected = model(x.clone())
    given = x.clone()
    quantized = QuantModel(model, target="virtual")
    torch.testing.assert_close(quantized(given), expected, rtol=0, atol=0)
    assert torch.equal(given, x)


class _Drops(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.fc, self.always = nn.Linear(16, 16), always

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.fc(x), 0.5, True if self.always else self.training)


@pytest.mark.parametrize("mode", [False, True])
def test_a_functional_dropout_follows_the_mode(mode: bool) -> None:
    x = torch.ones(8, 16)
    quantized = QuantModel(_Drops(False).train(mode), target="virtual")
    assert torch.equal(quantized.eval()(x), quantized(x))
    assert (quantized.train()(x) == 0).any()


def test_a_dropout_told_to_drop_always_does() -> None:
    quantized = QuantModel(_Drops(True).eval(), target="virtual")
    assert (quantized.eval()(torch.ones(8, 16)) == 0).any()
