"""Fashion-MNIST: 60 000 training and 10 000 test images of clothes, 28x28, ten classes.

Taken from Debian's package `dataset-fashion-mnist` where it is installed, from FASHION_MNIST (a folder), or downloaded
once into ~/.cache/onnxq.
"""

from __future__ import annotations

import gzip
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SOURCE = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
MEAN, STD = 0.286, 0.353


@dataclass(frozen=True, eq=False)
class Images:
    """images [N, 1, 28, 28] float32, normalized; labels [N] int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, size: int, generator: torch.Generator | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """All images in batches; with a generator in its order, else in theirs."""
        order = (
            torch.arange(len(self))
            if generator is None
            else torch.randperm(len(self), generator=generator)
        )
        return [(self.images[part], self.labels[part]) for part in order.split(size)]

    def take(self, count: int) -> Images:
        """The first of them."""
        return Images(self.images[:count], self.labels[:count])


def folder() -> Path:
    """Where the files are; downloads them if they are nowhere."""
    for found in (Path(os.environ.get("FASHION_MNIST", "")), DEBIAN):
        if (found / FILES["test"][0]).is_file():
            return found
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnxq" / "fashion-mnist"
    )
    cache.mkdir(parents=True, exist_ok=True)
    for name in (name for names in FILES.values() for name in names):
        if not (cache / name).is_file():
            print(f"downloading {SOURCE}{name}")
            partial = cache / f"{name}.part"
            urllib.request.urlretrieve(SOURCE + name, partial)
            partial.replace(cache / name)
    return cache


def load(split: str) -> Images:
    """ "train" or "test"."""
    images, labels = (_idx(folder() / name) for name in FILES[split])
    scaled = (torch.from_numpy(images).float().unsqueeze(1) / 255 - MEAN) / STD
    return Images(scaled, torch.from_numpy(labels).long())


def _idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    rank = raw[3]
    shape = np.frombuffer(raw, ">u4", rank, 4).astype(int)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()
