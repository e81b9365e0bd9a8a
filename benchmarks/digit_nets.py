#!/usr/bin/env python3
"""Train two small nets on scikit-learn's digits and write them as a corpus, for `accuracy_requests.py`.

Needs torch and scikit-learn.

    python benchmarks/digit_nets.py out/digits

digits_plain: convolutions one behind the other, as in VGG. digits_mixer: patches whose features and positions are
mixed by products in turn (Tolstikhin et al., "MLP-Mixer", 2021). digits: the demo's own net, as it lies there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEMO = Path(__file__).resolve().parents[1] / "examples" / "digits"
SEED, EPOCHS, BATCH, RATE = 0, 15, 64, 2e-3
PATCH, WIDTH, BLOCKS = 4, 128, 3


class Mixer(nn.Module):
    """Blocks of two pairs of products with a residual connection each, behind a convolution that cuts patches."""

    def __init__(self) -> None:
        super().__init__()
        patches = (16 // PATCH) ** 2
        self.cut = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.positions = nn.ModuleList(_make_pair(patches, 4 * patches) for _ in range(BLOCKS))
        self.features = nn.ModuleList(_make_pair(WIDTH, 2 * WIDTH) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * BLOCKS))
        self.linear = nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        """[N, 1, 16, 16] -> logits [N, 10]."""
        x = self.cut(image).flatten(2).transpose(1, 2)
        for k, (positions, features) in enumerate(zip(self.positions, self.features, strict=True)):
            x = x + positions(self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + features(self.norms[2 * k + 1](x))
        return self.linear(x.mean(1))


def _make_pair(size: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size))


def make_plain() -> nn.Sequential:
    """[N, 1, 16, 16] -> logits [N, 10]."""
    layers: list[nn.Module] = []
    for read, written, stride in (
        (1, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
    ):
        layers += [nn.Conv2d(read, written, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def train(net: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    """The net after some epochs of Adam, in an order that the seed gives."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order.split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return net.eval()


def main() -> None:
    """Train, export, write images that no training saw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the corpus")
    out = parser.parse_args().out
    sys.path.insert(0, str(DEMO))
    from train import EVAL, export, load

    for folder in ("models", "data"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(array) for array in load())
    images = images.float()
    shutil.copy(DEMO / "digits.onnx", out / "models" / "digits.onnx")
    for name, make in (("digits_plain", make_plain), ("digits_mixer", Mixer)):
        torch.manual_seed(SEED)
        net = train(make(), images[EVAL:], labels[EVAL:])
        right = (net(images[:EVAL]).argmax(1) == labels[:EVAL]).float().mean()
        print(f"{name}: {right:.4f} of {EVAL} digits that it was not trained on", file=sys.stderr)
        export(net, out / "models" / f"{name}.onnx")
    for name in ("digits", "digits_plain", "digits_mixer"):
        np.savez(out / "data" / f"{name}.npz", **{"eval/image": images[:EVAL].numpy()})


if __name__ == "__main__":
    main()
