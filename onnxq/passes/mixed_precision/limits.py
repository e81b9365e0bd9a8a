"""Which candidates of the passes that spend float, bits and scales are worth a trial: one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """The candidates of one pass that are worth a trial.

    least_gain: of the noise at the outputs, the least share that one must take away. most_left: share of the noise that
    may be left by it. most_time: predicted time of the network, relative. one_of: of so many operators or nodes one may
    be taken. samples: that gains are predicted on.
    """

    least_gain: float = 0.0
    most_left: float = math.inf
    most_time: float = math.inf
    one_of: int = 1
    samples: int = 0


# By the name of the pass.
LIMITS: Mapping[str, SearchLimits] = {
    # Of the best candidate's gain: for less an operator is not given up. Without a request not for more than half of
    # the operators: a model beyond is no int8 model any more. Ranking runs hundreds of candidates on these samples.
    "promotion": SearchLimits(least_gain=0.1, one_of=2, samples=8),
    # An input that makes more than half of the noise is alone to blame; other samples, where shares differ by chance,
    # must agree. A network of fewer than 24 operators has none to spare. The noise of activations is much alike on all
    # samples.
    "sensitive_ops": SearchLimits(least_gain=0.5, most_left=0.6, one_of=24, samples=2),
    # Noise of the pair on scales of each run, beside the calibrated one.
    "dynamic_scales": SearchLimits(most_left=0.5),
    # A twentieth of the noise that all pairs make, each alone, and so much more time than the planner's choice takes.
    "float_ops": SearchLimits(least_gain=0.05, most_time=1.15),
    # Nodes in float32 beside float16: with more than half of the suspects there the type is not worth it. Ranges are
    # measured on these samples, the extreme ones among them.
    "high_precision": SearchLimits(one_of=2, samples=16),
}
