"""scikit-learn's digits: small networks, the training of one, and its score on images that it did not see."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.torch.nets import take_step
from torch_frontend import qat


class Digits(nn.Module):
    """A network that loses accuracy in few bits. Input [N, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.a, self.b = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        x = torch.relu(x + self.b(torch.relu(self.a(x))))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.bn1, self.relu = nn.BatchNorm2d(channels) if norm else nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.conv2(self.relu(self.bn1(self.conv1(x)))))


class Residuals(nn.Module):
    """Stem, two residual blocks with a pool between them, classifier. Input [N, 1, 8, 8]."""

    def __init__(self, width: int = 6, norm: bool = True) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(1, width, 3, padding=1), nn.MaxPool2d(2)
        self.layer1, self.layer2 = Residual(width, norm), Residual(width, norm)
        self.fc = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.pool(self.layer1(torch.relu(self.stem(x)))))
        return self.fc(x.view(x.size(0), -1))


@cache
def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1200 images with labels, and those that nothing is trained on."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


@cache
def train_digits(make: Callable[[], nn.Module], rate: float, epochs: int) -> nn.Module:
    """A trained net."""
    x, y, *_ = load_digits()
    torch.manual_seed(0)
    net = make()
    fit(net, torch.optim.Adam(net.parameters(), lr=rate), x, y, epochs=epochs)
    return net.eval()


def fit(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, *, epochs: int, pacer=None) -> None:
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        net.train()
        for rows in torch.randperm(len(x), generator=generator).split(64):
            if pacer is not None:
                pacer.step()
            take_step(optimizer, functional.cross_entropy(net(x[rows]), y[rows]) + qat.penalty(net))
        decay.step()


def score(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent of right answers."""
    with torch.no_grad():
        return 100 * float((net(x).argmax(1) == y).double().mean())
