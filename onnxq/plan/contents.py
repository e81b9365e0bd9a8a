"""The values that the tensors of a plan hold on seeded inputs: by these it knows them in a file that tools rewrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from onnxq.arrays import Array, ArrayDict, as_float64
from onnxq.config.rows import Form, Written
from onnxq.config.schema import Natural
from onnxq.sites import Names

# Of the root mean square: rounding between a graph and its rewritten form stays a hundred times below this in deep
# networks, and two tensors that are not the same differ by more in one of five figures.
TOLERANCE = 1e-3
# Weights are copied or folded, which takes one rounding.
CONSTANT_TOLERANCE = 1e-5
FIGURES = ("mean", "magnitude", "rms", "highest", "lowest")
_CONSTANT = " constant"


@dataclass(frozen=True)
class Sketch:
    """Figures of a tensor that neither Transpose nor Reshape changes: its size, and five of its values."""

    size: int
    mean: float
    magnitude: float
    rms: float
    highest: float
    lowest: float
    # A weight, or any other constant.
    constant: bool = False

    def measure_distance(self, other: Sketch) -> float:
        """The largest difference of two figures, over the root mean square; infinite for another size."""
        if self.size != other.size or not self.size:
            return math.inf
        most = max(abs(getattr(self, name) - getattr(other, name)) for name in FIGURES)
        return most / max(self.rms, other.rms) if most else 0.0

    def is_alike(self, other: Sketch) -> bool:
        """True where the two may be of one tensor."""
        limit = CONSTANT_TOLERANCE if self.constant and other.constant else TOLERANCE
        return self.measure_distance(other) <= limit

    def __str__(self) -> str:
        figures = " ".join(f"{getattr(self, name):.7g}" for name in FIGURES)
        return f"{self.size} {figures}{_CONSTANT if self.constant else ''}"


def read_sketch(text: str) -> Sketch:
    """The sketch that `str` wrote. Raises ValueError for another text."""
    size, *figures = text.removesuffix(_CONSTANT).split()
    values = tuple(map(float, figures))
    if len(values) != len(FIGURES) or not all(map(math.isfinite, values)):
        raise ValueError("must be a size and five finite figures")
    mean, magnitude, rms, highest, lowest = values
    return Sketch(int(size), mean, magnitude, rms, highest, lowest, text.endswith(_CONSTANT))


# As one text.
SKETCH = Form(str, read_sketch, str)


@dataclass(frozen=True)
class NodeContents:
    """A node that the plan names: its operator, the tensors it reads ("" where none), and the first it makes.

    turned: it transposes its second input, as Gemm may.
    """

    op_type: str
    inputs: Names
    output: str
    turned: Written[bool] = False


# One that can be seeded.
_FeedType = Literal[
    "float16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
]


@dataclass(frozen=True)
class Feed:
    """A seeded input: its type, its shape, and the bounds of integers, the upper one exclusive."""

    dtype: Annotated[str, Form(_FeedType)]
    shape: tuple[Natural, ...]
    low: Written[int] = 0
    high: Written[int] = 0


@dataclass(frozen=True)
class Contents:
    """The main graph of a prepared model, before any scaling, as far as its plan names it.

    topology: of that graph. feeds: inputs of the run, by name. tensors, nodes: by name.
    """

    topology: str
    feeds: Mapping[str, Feed]
    tensors: Mapping[str, Annotated[Sketch, SKETCH]]
    nodes: Mapping[str, NodeContents]


def make_feeds(feeds: Mapping[str, Feed]) -> ArrayDict:
    """The inputs of the run, the same from every version of numpy."""
    inputs: ArrayDict = {}
    for name in sorted(feeds):
        feed = feeds[name]
        # NOTE: numpy keeps the numbers of RandomState, those of its newer generators may change.
        random = np.random.RandomState(len(inputs))
        dtype = np.dtype(feed.dtype)
        values = (
            random.standard_normal(feed.shape)
            if dtype.kind == "f"
            else random.randint(feed.low, max(feed.high, feed.low + 1), feed.shape)
        )
        inputs[name] = np.asarray(values).astype(dtype)
    return inputs


# Of values, so that their squares have a finite mean in float64.
_HUGE = 1e30


def sketch_values(values: Array, *, constant: bool = False) -> Sketch:
    """The figures of an array of numbers."""
    flat = as_float64(values).ravel()
    if not flat.size:
        return Sketch(0, 0.0, 0.0, 0.0, 0.0, 0.0, constant)
    # Attention masks hold -inf, whose mean says nothing. Copies of large tensors take longer than the figures.
    if not -_HUGE <= flat.min() <= flat.max() <= _HUGE:
        flat = np.nan_to_num(flat, nan=0.0, posinf=1e4, neginf=-1e4).clip(-_HUGE, _HUGE)
    mean = float(flat.mean())
    size = float(abs(flat).mean())
    rms = math.sqrt(float(np.square(flat).mean()))
    return Sketch(flat.size, mean, size, rms, float(flat.max()), float(flat.min()), constant)
