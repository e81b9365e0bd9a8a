"""The samples that determine ranges: e.g. the loudest, brightest and longest of a set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# Of each extreme the samples that calibration keeps must reach so much: a range a tenth too short clips little.
_REACH = 0.9


def find_extremes(samples: Iterable[Mapping[str, Array]], wanted: int = 0) -> frozenset[int]:
    """Find the samples with the least or greatest value, the most energy or the most elements of an input.

    samples: inputs by name, any shapes. Integer inputs count by their size only, because their values are indices.
    Of equal samples the first counts. An input that is the same in all samples is ignored.
    wanted: so many others are wanted. Where fewer are left, as with many inputs, those extremes are left out, too,
    without which all others still reach nine tenths as far.
    Returns the samples' positions.
    """
    table = np.array([[x for name in sorted(sample) for x in _measure_array(sample[name])] for sample in samples])
    peaks = table.max(axis=0)
    varying = peaks > table.min(axis=0)
    extremes = np.unique(table[:, varying].argmax(axis=0))
    if len(table) - len(extremes) >= wanted:
        return frozenset(extremes.tolist())
    least = peaks * np.where(peaks > 0, _REACH, 2 - _REACH)
    kept = set(range(len(table)))
    # Others first, none of which is missed; then the extremes that lead by least.
    leads = (table - least).max(axis=1)
    for position in sorted(kept, key=lambda one: (one in extremes, leads[one])):
        rest = sorted(kept - {position})
        if len(table) - len(kept) < wanted and rest and (table[rest].max(axis=0) >= least).all():
            kept.discard(position)
    return frozenset(kept)


def _measure_array(value: Array) -> tuple[float, ...]:
    """Measure an array: size; of floats also negated minimum, maximum and mean square. Larger is more extreme."""
    if value.dtype.kind != "f" or not value.size:
        return float(value.size), 0.0, 0.0, 0.0
    wide = value.astype(np.float32, copy=False)
    if not np.isfinite(wide.min()):
        # A mask's -inf is in no range.
        wide = wide[np.isfinite(wide)]
    with np.errstate(over="ignore"):
        power = float(np.mean(np.square(wide))) if wide.size else 0.0
    return float(value.size), -float(wide.min(initial=np.inf)), float(wide.max(initial=-np.inf)), power
