"""The samples that determine ranges: e.g. the loudest, brightest and longest of a set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def find_extremes(samples: Iterable[Mapping[str, Array]]) -> frozenset[int]:
    """Find the samples with the least or greatest value, the most energy or the most elements of an input.

    samples: inputs by name, any shapes. Integer inputs count by their size only, because their values are indices.
    Of equal samples the first counts. An input that is the same in all samples is ignored.
    Returns the samples' positions.
    """
    measures: dict[str, list[tuple[float, ...]]] = {}
    for sample in samples:
        for name, value in sample.items():
            measures.setdefault(name, []).append(_measure_array(value))
    positions: set[int] = set()
    for rows in measures.values():
        for column in zip(*rows, strict=True):
            if max(column) > min(column):
                positions.add(int(np.argmax(column)))
    return frozenset(positions)


def _measure_array(value: Array) -> tuple[float, ...]:
    """Measure an array: size; of floats also negated minimum, maximum and mean square. Larger is more extreme."""
    if value.dtype.kind != "f" or not value.size:
        return float(value.size), 0.0, 0.0, 0.0
    wide = value.astype(np.float32, copy=False)
    return float(value.size), -float(wide.min()), float(wide.max()), float(np.mean(np.square(wide)))
