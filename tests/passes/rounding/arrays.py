"""The rounding strategies on bare arrays, without an operator and its site."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.passes.rounding import gptq_core, low_bit_core
from onnxq.passes.rounding.gptq_core import ErrorFeedback, RoundedWeight, RoundingProblem
from onnxq.passes.rounding.low_bit_core import FACTORS
from onnxq.passes.rounding.second_moments import Accumulator, Part

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class _HeldColumns:
    x: Array
    y: Array

    def take_columns(self, first: int, last: int, *, both: bool) -> Sequence[Array]:
        return [columns[:, :, first:last] for columns in ((self.y, self.x) if both else (self.y,))]


def add_samples(sums: Accumulator, x: Array, y: Array, parts: Sequence[Part] | None = None) -> None:
    """Add x and y, float32 [groups, K, n]. parts: means over all positions, if x and y hold only some."""
    count = x.shape[2]
    if count and parts is None:
        parts = [(count, x.mean(axis=2, dtype=np.float64), y.mean(axis=2, dtype=np.float64))]
    sums.add_columns(_HeldColumns(x, y), count, parts or ())


def pose(
    w: Array,
    feedback: ErrorFeedback,
    scale: Array,
    zero: Array,
    limits: tuple[int, int],
    partner: Array | None = None,
    **more: Any,
) -> RoundingProblem:
    """The problem of these arrays, each [groups, rows, K]."""
    return RoundingProblem(w, scale, zero, limits, lambda: feedback, partner=partner, **more)


def round_with_feedback(w: Array, feedback: ErrorFeedback, *arrays: Any) -> NDArray[np.int32]:
    return gptq_core.round_with_feedback(pose(w, feedback, *arrays)).codes


def round_to_nearest(
    w: Array, scale: Array, zero: Array, limits: tuple[int, int], partner: Array | None = None
) -> NDArray[np.int32]:
    # It asks for no second moments.
    return gptq_core.round_to_nearest(pose(w, None, scale, zero, limits, partner)).codes  # type: ignore[arg-type]


def round_within_sums(w: Array, feedback: ErrorFeedback, *arrays: Any) -> RoundedWeight:
    return gptq_core.round_within_sums(pose(w, feedback, *arrays))


def round_low_bit(w: Array, feedback: ErrorFeedback, *arrays: Any, **more: Any) -> RoundedWeight:
    return low_bit_core.round_low_bit(pose(w, feedback, *arrays, factors=FACTORS, **more))
