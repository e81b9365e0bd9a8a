"""Batch norms fold into the layer in front where nobody sees the difference, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from torch_frontend.quant_model import QuantModel


class _After(nn.Module):
    """A layer and its batch norm."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
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
        return self.norm(self.layer(x))


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


class _ReadTwice(_After):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y) + y


class _CalledTwice(_After):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(self.layer(x)))


class _Tied(_After):
    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__(layer, norm)
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.norm(self.layer(x)))


def _conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


UNSAFE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "read twice": (lambda: _ReadTwice(_conv(), nn.BatchNorm2d(4)), (2, 4, 8, 8), "others read"),
    "called twice": (lambda: _CalledTwice(_conv(), nn.BatchNorm2d(4)), (2, 4, 8, 8), "more than once"),
    "tied": (lambda: _Tied(_conv(), nn.BatchNorm2d(4)), (2, 4, 8, 8), "another layer's too"),
    "no statistics": (lambda: _After(_conv(), nn.BatchNorm2d(4, track_running_stats=False)), (2, 4, 8, 8),
                      "no running statistics"),
    "linear over positions": (lambda: _After(nn.Linear(4, 6), nn.BatchNorm1d(6)), (2, 6, 4), "features"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
def test_a_batch_norm_that_others_would_miss_stays(name: str) -> None:
    make, shape, why = UNSAFE[name]
    model, x = make(), torch.randn(shape)
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    (decision,) = [d for d in quantized.decisions if d.rule == "fuse-bn"]
    assert decision.subject == "norm"
    assert why in decision.reason
    assert torch.equal(quantized(x), model(x))


def test_without_an_example_a_linear_keeps_its_batch_norm() -> None:
    quantized = QuantModel(_After(nn.Linear(4, 6), nn.BatchNorm1d(6)), target="virtual")
    assert ["example_inputs" in d.reason for d in quantized.decisions if d.rule == "fuse-bn"] == [True]


def test_folding_can_be_left_out() -> None:
    config = {"target": "virtual", "torch": {"fuse_bn": False}}
    quantized = QuantModel(_After(_conv(), nn.BatchNorm2d(4)), config)
    assert any(isinstance(module, nn.BatchNorm2d) for module in quantized.modules())
