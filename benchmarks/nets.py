#!/usr/bin/env python3
"""Small trained networks of kinds that a corpus may lack, as one of their own: a ViT, an audio transformer, an LSTM.

    python benchmarks/nets.py OUT [vit audio lstm]      some minutes on one core; needs torch

Each learns ten classes that are synthesized here: gratings under noise, tones of ten timbres, words of ten topics. The
folder then serves `peers.py --corpus OUT`; its evaluate.py is a copy of `score_classes.py`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
CLASSES = 10
CALIBRATION, EVALUATION = 64, 1000
# Of sounds in Hz, and the harmonics of a tone; of texts.
RATE, HARMONICS, WORDS = 8000, 12, 2000


class Block(nn.Module):
    """One block of a transformer, norms first. x: [N, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        query, key, value = (
            one(normed).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x + self.feed(self.between(x))


class Transformer(nn.Module):
    """Patches by convolutions, blocks, and a linear layer on the mean token. stem: gives [N, width, …]."""

    def __init__(self, stem: nn.Module, tokens: int, width: int, blocks: int) -> None:
        super().__init__()
        self.stem, self.places = stem, nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(
            *(Block(width, width // 64) for _ in range(blocks)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2) + self.places).mean(1))


class Recurrent(nn.Module):
    """Embeddings, a bidirectional LSTM, and a linear layer on the mean of its answers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.table(x))[0].mean(1))


def make_vit() -> nn.Module:
    """32x32 pixels in 64 patches."""
    return Transformer(nn.Conv2d(3, 192, 4, 4), 64, 192, 6)


def make_audio_net() -> nn.Module:
    """Half a second of sound in 128 frames, by strided convolutions as speech encoders have them."""
    stem = nn.Sequential(
        nn.Conv1d(1, 64, 16, 8, 4),
        nn.GELU(),
        nn.Conv1d(64, 128, 4, 2, 1),
        nn.GELU(),
        nn.Conv1d(128, 192, 2, 2),
    )
    return Transformer(stem, 128, 192, 4)


def draw_images(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Coloured gratings of an angle and a period that the class gives, another at half of it over them, noise."""
    y, x = np.mgrid[:32, :32] / 32.0

    def grate(kinds: np.ndarray) -> np.ndarray:
        angle = np.pi * (kinds % 5) / 5 + rng.normal(0, 0.05, kinds.shape)
        rate = np.where(kinds < 5, 4.0, 6.0) * rng.uniform(0.95, 1.05, kinds.shape)
        phase = rng.uniform(0, 2 * np.pi, (len(kinds), 1, 1))
        along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
        return np.sin(2 * np.pi * rate[:, None, None] * along + phase)

    mixed = grate(labels) + 0.5 * grate(rng.integers(0, CLASSES, labels.shape))
    colours = rng.uniform(0.3, 1, (len(labels), 3, 1, 1))
    return (mixed[:, None] * colours + rng.normal(0, 0.5, (len(labels), 3, 32, 32))).astype(
        np.float32
    )


def draw_sounds(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Tones of any height; the class gives how loud each harmonic is."""
    timbres = np.random.default_rng(1).gamma(0.7, 1.0, (CLASSES, HARMONICS))
    loud = timbres[labels] * rng.lognormal(0, 0.2, (len(labels), HARMONICS))
    loud /= np.linalg.norm(loud, axis=1, keepdims=True)
    heights = rng.uniform(100, 200, (len(labels), 1)) * np.arange(1, HARMONICS + 1)
    times = np.arange(4096) / RATE
    phases = rng.uniform(0, 2 * np.pi, heights.shape)
    tones = sum(
        loud[:, k, None] * np.sin(2 * np.pi * heights[:, k, None] * times + phases[:, k, None])
        for k in range(HARMONICS)
    )
    faded = tones * np.exp(-times * rng.uniform(0, 8, (len(labels), 1)))
    return (faded + rng.normal(0, 0.05, faded.shape)).astype(np.float32)[:, None]


def draw_texts(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """48 words: some are of the topic, the rest of a text that has none; few words are frequent."""
    chances = np.arange(1, WORDS + 1) ** -1.0
    common = rng.choice(WORDS, (len(labels), 48), p=chances / chances.sum())
    topics = np.random.default_rng(1).permuted(np.tile(np.arange(WORDS), (CLASSES, 1)), axis=1)
    own = np.take_along_axis(topics[labels], common, axis=1)
    return np.where(rng.random(common.shape) < 0.2, own, common)


@dataclass(frozen=True)
class Task:
    """A network, its samples, and how long it learns. name: of the input."""

    make: Callable[[], nn.Module]
    draw: Callable[[np.random.Generator, np.ndarray], np.ndarray]
    name: str
    steps: int
    batch: int
    rate: float


TASKS = {
    "vit": Task(make_vit, draw_images, "image", 250, 32, 1e-3),
    "audio": Task(make_audio_net, draw_sounds, "sound", 250, 32, 1e-3),
    "lstm": Task(lambda: Recurrent(128), draw_texts, "ids", 400, 64, 4e-3),
}


def train(task: Task) -> nn.Module:
    """The network after its steps, each on new samples."""
    torch.manual_seed(0)
    net, rng = task.make(), np.random.default_rng(2)
    chosen = torch.optim.AdamW(net.parameters(), task.rate)
    pace = torch.optim.lr_scheduler.OneCycleLR(chosen, task.rate, task.steps)
    for step in range(task.steps):
        labels = rng.integers(0, CLASSES, task.batch)
        loss = nn.functional.cross_entropy(
            net(torch.from_numpy(task.draw(rng, labels))), torch.from_numpy(labels)
        )
        chosen.zero_grad()
        loss.backward()
        chosen.step()
        pace.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.3f}", file=sys.stderr, flush=True)
    return net.eval()


def write_net(folder: Path, name: str) -> None:
    """Train one, and write its model, samples and labels."""
    task = TASKS[name]
    net = train(task)
    rng = np.random.default_rng(3)
    labels = rng.integers(0, CLASSES, CALIBRATION + EVALUATION)
    samples = task.draw(rng, labels)
    arrays = {
        f"calib/{task.name}": samples[:CALIBRATION],
        f"eval/{task.name}": samples[CALIBRATION:],
    }
    np.savez(folder / "data" / f"{name}.npz", **arrays, **{"label/y": labels[CALIBRATION:]})
    with warnings.catch_warnings():
        # The older exporter, which keeps LSTM one operator, and says it is older.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.from_numpy(samples[:1]),),
            str(folder / "models" / f"{name}.onnx"),
            input_names=[task.name],
            output_names=["logits"],
            dynamic_axes={task.name: {0: "N"}, "logits": {0: "N"}},
            opset_version=17,
            dynamo=False,
        )


def main() -> None:
    """Write the corpus."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the corpus")
    parser.add_argument("names", nargs="*", default=[*TASKS], help=", ".join(TASKS))
    arguments = parser.parse_args()
    folder = arguments.out
    for part in ("models", "data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / "score_classes.py", folder / "evaluate.py")
    for name in arguments.names:
        write_net(folder, name)


if __name__ == "__main__":
    main()
