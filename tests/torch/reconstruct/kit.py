"""Small networks with quantizers to reconstruct, and data with the correlations of real inputs."""

import torch
from torch import nn

from onnxq.sites import Role
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.nets import observe
from torch_frontend.quantizers import create_quantizer


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int = 64, width: int = 12) -> torch.Tensor:
    """Correlated, as real inputs are: for white ones rounding to nearest is best already."""
    return values(count, 4, seed=3) @ values(4, width, seed=4)


class QLinear(nn.Linear):
    """The smallest module with quantizers: no graph, no QuantModel."""

    def __init__(self, a: int, b: int, site: str, kind: str = "uniform") -> None:
        super().__init__(a, b)
        self.seen = create_quantizer("uniform", QuantSpec(), site=f"{site}.in")
        spec = QuantSpec(bits=3, granularity=PerChannel(0))
        self.weight_quantizer = create_quantizer(kind, spec, site=f"{site}.weight", role=Role.WEIGHT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.seen(x), self.weight_quantizer(self.weight), self.bias)


def plain_net(*kinds: str) -> nn.Sequential:
    torch.manual_seed(1)
    first, second = kinds or ("uniform", "uniform")
    net = nn.Sequential(QLinear(12, 16, "a", first), nn.ReLU(), QLinear(16, 8, "b", second))
    observe(net, rows())
    return net
