"""The samples that ranges hang on: the loudest, the brightest, the longest of a set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def extremes(samples: Iterable[Mapping[str, Array]]) -> frozenset[int]:
    """Positions of the samples that hold the least or greatest value, the most energy or the most elements of an input.

    samples: inputs by name, any shapes; integer inputs count by their size alone, for their values are names.
    Where several are alike the first counts, and an input that is the same in all of them counts for nothing.
    """
    found: dict[str, list[tuple[float, ...]]] = {}
    for sample in samples:
        for name, value in sample.items():
            found.setdefault(name, []).append(_measures(value))
    kept: set[int] = set()
    for rows in found.values():
        for column in zip(*rows, strict=True):
            if max(column) > min(column):
                kept.add(int(np.argmax(column)))
    return frozenset(kept)


def _measures(value: Array) -> tuple[float, ...]:
    """What is compared: size; negated minimum, maximum and mean square of floats."""
    if value.dtype.kind != "f" or not value.size:
        return float(value.size), 0.0, 0.0, 0.0
    wide = value.astype(np.float32, copy=False)
    return float(value.size), -float(wide.min()), float(wide.max()), float(np.mean(np.square(wide)))
