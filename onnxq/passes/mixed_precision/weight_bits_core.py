"""Choose bit widths of weights for a given average: greedily by the error removed per bit.

A weight's error at the outputs is measured once, at its fewest bits, and falls by 6 dB with each further bit, as
rounding errors do. Errors of different weights add up (they are nearly uncorrelated). So the gain of a width follows
from one measurement. The greedy choice is the optimum of the relaxed problem; with whole weights it misses that by at
most one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """A weight. elements: their number. bits: its fewest. error: at the outputs with these. widths: other choices."""

    elements: int
    bits: int
    error: float
    widths: tuple[int, ...]


def spend_budget(weights: Sequence[Weight], average: float, others: tuple[int, int] = (0, 0)) -> list[int]:
    """Bits of each weight, so that the average over elements is at most `average`, or unchanged if it is above.

    others: (elements, sum of their bits) of weights that count towards the average and cannot change.
    """
    bits = [one.bits for one in weights]
    elements = others[0] + sum(one.elements for one in weights)
    room = average * elements - others[1] - sum(one.elements * one.bits for one in weights)
    while True:
        best: tuple[float, int, int] | None = None
        for k, one in enumerate(weights):
            for width in one.widths:
                cost = (width - bits[k]) * one.elements
                if width <= bits[k] or cost > room or cost <= 0:
                    continue
                # 6 dB a bit: a quarter of the power.
                gain = one.error * (4.0 ** (one.bits - bits[k]) - 4.0 ** (one.bits - width)) / cost
                if best is None or gain > best[0]:
                    best = gain, k, width
        if best is None or best[0] <= 0:
            return bits
        _, k, width = best
        room -= (width - bits[k]) * weights[k].elements
        bits[k] = width


def mean_bits(elements: Sequence[int], bits: Sequence[int]) -> float:
    """Average bits over elements; 0 without elements."""
    total = sum(elements)
    return sum(n * b for n, b in zip(elements, bits, strict=True)) / total if total else 0.0
