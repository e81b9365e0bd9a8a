"""Sizes of the tiny decoder of these tests, and its trained weights."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.decoders.text import VOCABULARY

WEIGHTS = Path(__file__).parent / "weights.npz"


@dataclass(frozen=True)
class Sizes:
    """theta: the base of the rotary frequencies."""

    vocabulary: int = VOCABULARY
    width: int = 64
    hidden: int = 128
    heads: int = 4
    key_heads: int = 2
    layers: int = 2
    theta: float = 10000.0

    @property
    def head(self) -> int:
        return self.width // self.heads


SIZES = Sizes()


def load_weights() -> dict[str, NDArray[np.float32]]:
    """Weights by torch's names, matrices as [out, in]."""
    with np.load(WEIGHTS) as file:
        return {name: file[name].astype(np.float32) for name in file.files}
