"""Equalization of the channels between two linear operators: the arithmetic on arrays.

Cross-layer equalization (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
https://arxiv.org/abs/1906.04721, section 4.1): with f(s·x) = s·f(x) for s > 0, channel c of the first operator may be
multiplied by s_c and the same channel of the second divided by it. r1_c is the largest weight of the first operator's
row c, r2_c that of the second's column c; s_c = sqrt(r1_c · r2_c) / r1_c makes both equal.

Where a tensor has several producers (an Add, a Concat) the weights say little about its values. There s_c is
(channel maximum / tensor maximum) ** -0.5 of the tensors themselves.

Both are divided by their geometric mean, so that a group as a whole keeps its size. Channels without weights or
without values (below 1e-6 of the largest) keep 1, and nothing is scaled by more than 2**12 either way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from onnxq.arrays import Array64, Mask, as_float32, as_float64

Labels = NDArray[np.intp]

# Share of the largest channel below which a channel counts as empty.
_DEAD = 1e-6
# Most that a channel is scaled by, up or down.
_FARTHEST = 2.0**12
# Of a channel's distance from the largest, in decibels, the share that goes.
_STRENGTH = 0.5


def merge_labels(count: int, pairs: Iterable[tuple[Labels, Labels]]) -> Labels:
    """[count] labels after uniting the two sides of every pair; the label of a class is its lowest member."""
    labels = np.arange(count, dtype=np.intp)
    united = list(pairs)
    changed = True
    while changed:
        before = labels.copy()
        for left, right in united:
            lowest = np.minimum(labels[left], labels[right])
            np.minimum.at(labels, left, lowest)
            np.minimum.at(labels, right, lowest)
        # Pointers to pointers, so that long chains take few rounds.
        labels = labels[labels]
        changed = not np.array_equal(before, labels)
    return labels


def equalize_weights(rows: Array64, columns: Array64, groups: Labels) -> Array64:
    """s = sqrt(rows · columns) / rows, [channels] each, normalized within each group."""
    alive = _find_alive(rows, groups) & _find_alive(columns, groups)
    s = np.ones_like(rows)
    s[alive] = np.sqrt(columns[alive] / rows[alive])
    return _normalize_factors(s, alive, groups)


def equalize_values(largest: Array64, groups: Labels) -> Array64:
    """s = (largest / the group's largest) ** -0.5, [channels], normalized within each group."""
    alive = _find_alive(largest, groups)
    s = np.ones_like(largest)
    s[alive] = (largest[alive] / _find_largest(largest, groups)[alive]) ** -_STRENGTH
    return _normalize_factors(s, alive, groups)


def _find_largest(values: Array64, groups: Labels) -> Array64:
    top = np.zeros(int(groups.max(initial=-1)) + 1)
    np.maximum.at(top, groups, values)
    return top[groups]


def _find_alive(values: Array64, groups: Labels) -> Mask:
    return np.isfinite(values) & (values > _DEAD * _find_largest(values, groups))


def _normalize_factors(s: Array64, alive: Mask, groups: Labels) -> Array64:
    """s divided by its geometric mean over the channels of each group that are not empty, within the limits."""
    members = groups[alive]
    logs = np.log(s[alive])
    # Of a group without members nobody asks for the mean.
    mean = np.bincount(members, logs) / np.maximum(np.bincount(members), 1)
    out = np.ones_like(s)
    out[alive] = np.exp(np.clip(logs - mean[members], -np.log(_FARTHEST), np.log(_FARTHEST)))
    # Plans store these numbers in float32, and applying a plan later must repeat them to the bit.
    return as_float64(as_float32(out))
