"""The float network: a small residual CNN, 147 thousand weights, and its training."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import Images


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(
            nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )
        if stride == 1 and wide == out:
            self.shortcut = nn.Sequential()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class FashionNet(nn.Module):
    """[N, 1, 28, 28] -> logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.blocks = nn.Sequential(Block(16, 32, 1), Block(32, 64, 2), Block(64, 64, 1))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def train(net: nn.Module, images: Images, *, epochs: int, lr: float, seed: int) -> nn.Module:
    """Train the float network: SGD, one cycle, random flips and shifts."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(images) // 128)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for epoch in range(epochs):
        start, total = time.perf_counter(), 0.0
        net.train()
        for x, label in images.batches(128, generator):
            loss = F.cross_entropy(net(varied(x, generator)), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.step()
            total += float(loss.detach()) * len(label)
        print(
            f"float epoch {epoch + 1}/{epochs}: loss {total / len(images):.3f}, {time.perf_counter() - start:.0f} s"
        )
    return net.eval()


def varied(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrored half the time, shifted by up to two pixels."""
    if torch.rand((), generator=generator) < 0.5:
        x = x.flip(3)
    dx, dy = (int(v) for v in torch.randint(-2, 3, (2,), generator=generator))
    return torch.roll(x, (dx, dy), (2, 3))
