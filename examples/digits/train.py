#!/usr/bin/env python3
"""Train the demo's digit classifier and write what the demo needs, from nothing but scikit-learn's digits.

    python examples/digits/train.py            # needs `pip install torch scikit-learn`; about a minute on two cores

Writes beside this file
    digits.onnx        float32 CNN: image [N, 1, 16, 16] in 0..1 -> logits [N, 10]
    digits.npz         calibration: {"image": [128, 1, 16, 16]}, training images only
    digits_eval.npz    {"image": [540, 1, 16, 16], "label": [540]}, images the training never saw

The 8x8 originals are enlarged to 16x16 so that the convolutions are of a size where int8 can pay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
SEED, EPOCHS, BATCH, EVAL, CALIB = 0, 30, 64, 540, 128


def conv_bn(cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution without bias and its batch norm, which the export folds."""
    conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


class Residual(nn.Module):
    """Two 3x3 convolutions around an addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = conv_bn(width, width, 3), conv_bn(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> the same shape."""
        return F.relu(x + self.second(F.relu(self.first(x))))


class Depthwise(nn.Module):
    """Inverted bottleneck: 1x1 up, 3x3 depthwise, 1x1 down, addition."""

    def __init__(self, width: int, expand: int) -> None:
        super().__init__()
        inner = width * expand
        self.up, self.depth, self.down = (
            conv_bn(width, inner, 1),
            conv_bn(inner, inner, 3, 1, inner),
            conv_bn(inner, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> the same shape."""
        return x + self.down(F.relu6(self.depth(F.relu6(self.up(x)))))


class Digits(nn.Module):
    """Stem, residual block, strided convolution, depthwise block, pooling, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.widen = conv_bn(1, 32, 3), conv_bn(32, 64, 3)
        self.residual, self.shrink = Residual(64), conv_bn(64, 64, 3, stride=2)
        self.depthwise, self.linear = Depthwise(64, 2), nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """[N, 1, 16, 16] -> logits [N, 10]."""
        x = F.relu(self.widen(F.relu(self.stem(image))))
        x = self.depthwise(F.relu(self.shrink(self.residual(x))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def load() -> tuple[np.ndarray, np.ndarray]:
    """All 1797 digits in a seeded order: float16 images [N, 1, 16, 16] in 0..1, labels [N]."""
    digits = load_digits()
    small = torch.from_numpy(digits.images / 16).float()[:, None]
    large = F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
    order = np.random.default_rng(SEED).permutation(len(large))
    # float16 holds these values exactly: multiples of 1/256 below 1.
    return large.numpy()[order].astype(np.float16), digits.target[order].astype(np.int64)


def shifted(batch: Tensor, generator: torch.Generator) -> Tensor:
    """The batch moved by up to one pixel of the original each way, the only augmentation."""
    dy, dx = (int(v) for v in torch.randint(-2, 3, (2,), generator=generator))
    return torch.roll(batch, (dy, dx), (2, 3))


def train(images: np.ndarray, labels: np.ndarray) -> Digits:
    """Adam with a one-cycle rate; every choice is seeded."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    x, y, net = torch.from_numpy(images).float(), torch.from_numpy(labels), Digits().train()
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=generator)
        total = 0.0
        for i in range(0, len(x) - BATCH + 1, BATCH):
            pick = order[i : i + BATCH]
            loss = F.cross_entropy(net(shifted(x[pick], generator)), y[pick], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1:2d}/{EPOCHS}  loss {total / (len(x) // BATCH):.4f}", flush=True)
    return net.eval()


def export(net: Digits, path: Path) -> None:
    """Write the trained net at opset 17 with a dynamic batch."""
    torch.onnx.export(
        net,
        (torch.zeros(1, 1, 16, 16),),
        str(path),
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "N"}, "logits": {0: "N"}},
        opset_version=17,
        dynamo=False,
    )
    onnx.checker.check_model(str(path), full_check=True)


def main() -> None:
    """Train, export, write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder to write to (default: beside this file)"
    )
    out = parser.parse_args().out
    torch.set_num_threads(2)
    images, labels = load()
    net = train(images[EVAL:], labels[EVAL:])
    with torch.no_grad():
        right = (
            net(torch.from_numpy(images[:EVAL]).float()).argmax(1).numpy() == labels[:EVAL]
        ).mean()
    print(f"accuracy on the {EVAL} images held back: {right:.4f}")
    out.mkdir(parents=True, exist_ok=True)
    export(net, out / "digits.onnx")
    np.savez_compressed(out / "digits.npz", image=images[EVAL : EVAL + CALIB].astype(np.float32))
    np.savez_compressed(
        out / "digits_eval.npz", image=images[:EVAL].astype(np.float32), label=labels[:EVAL]
    )


if __name__ == "__main__":
    main()
