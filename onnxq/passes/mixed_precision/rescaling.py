"""A rising curve through predictions and measurements of some models, which tells of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Of a curve where measurements do not rise: that it can be read either way.
_SLOPE = 1e-6


@dataclass(frozen=True, eq=False)
class Rescaling:
    """A rising curve from what was predicted to what was measured, through logarithms of both, at these points."""

    predicted: Sequence[float] = (0.0,)
    measured: Sequence[float] = (0.0,)

    @classmethod
    def fit_pairs(cls, pairs: Iterable[tuple[float, float]]) -> Rescaling:
        """The rising curve nearest to pairs of predicted and measured (pool adjacent violators, Barlow et al. 1972)."""
        finite = ((a, b) for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf)
        logs = sorted((math.log(a), math.log(b)) for a, b in finite)
        # Leftmost and rightmost prediction, mean of the measurements, and their number.
        blocks = []
        for at, value in logs:
            blocks.append((at, at, value, 1))
            while len(blocks) > 1 and (
                blocks[-2][2] >= blocks[-1][2] or blocks[-2][1] >= blocks[-1][0]
            ):
                (left, _, low, n), (_, right, high, m) = blocks[-2:]
                blocks[-2:] = [(left, right, (low * n + high * m) / (n + m), n + m)]
        ends = [
            (at, value + slope)
            for left, right, value, _ in blocks
            for at, slope in {left: 0.0, right: _SLOPE * (right - left)}.items()
        ]
        return cls(*zip(*ends, strict=True)) if ends else cls()

    def expect_measurement(self, value: float) -> float:
        """The measurement to expect at a prediction."""
        return _follow_curve(value, self.predicted, self.measured)

    def find_prediction(self, value: float) -> float:
        """The prediction at which so much is to be expected."""
        return _follow_curve(value, self.measured, self.predicted)


def _follow_curve(value: float, x: Sequence[float], y: Sequence[float]) -> float:
    """Between points by a line, beyond them in proportion."""
    if not 0 < value < math.inf:
        return value
    at = math.log(value)
    # Beyond the ends nothing was measured: the last ratio holds.
    inside = min(max(at, x[0]), x[-1])
    return math.exp(float(np.interp(inside, x, y)) + at - inside)


def bisect_noise(failing: Sequence[float], holding: Sequence[float]) -> float:
    """A prediction between the least at which something fails and the most below at which it holds.

    For figures that are no smooth function of the noise. Infinite where nothing fails.
    """
    high = min(failing, default=math.inf)
    low = max((noise for noise in holding if noise < high), default=0.0)
    if high == math.inf:
        return math.inf
    # The middle in dB, or 6 dB less.
    return math.sqrt(low * high) if low else high / 4
