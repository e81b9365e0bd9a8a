"""The samples of a run, parted by the decisions they serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onnxq.data import Dataset
from onnxq.evaluation.accumulator import Array
from onnxq.passes.judging import Evaluator
from onnxq.runtime.crew import Crew

# Samples of the calibration among the judges of ranges and rounded weights.
_JUDGES_OF_CALIBRATION = 8
# Samples of the calibration in the comparison with an equalized model, which is calibrated anew for it: few do.
_TRIAL = 4


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples in three sets: for rewrites and weights, for choosing between plans, for the figures reported.

    They share no sample while there are enough; `validation` is `test` where nothing is chosen. ranges: those that
    activations are observed on, calibration and validation, but no more than were asked for: all plans compared have
    these ranges alike, and a range misses values it has not seen. seen: the other use of the samples in `test`, ""
    where there was none. first: of them all, which is timed as `bench` does.
    crew: runs plans that are judged.
    """

    calibration: Dataset
    ranges: Dataset
    validation: Dataset
    test: Dataset
    seen: str
    first: Mapping[str, Array]
    description: str
    synthetic: bool
    seed: int = 0
    crew: Crew = field(default_factory=Crew)

    @cached_property
    def judge(self) -> Evaluator:
        """Scores plans on `validation`."""
        return Evaluator(self.validation, self.crew)

    @cached_property
    def judges(self) -> Evaluator:
        """Scores ranges and rounded weights, on some of the calibration samples as well.

        Those hold the extremes, which are never held back and show the cost of clipping (a ViT for TensorRT: 36.4 ->
        36.4 dB on 8 held back, 35.7 -> 29.0 with 8 more, 34.6 -> 32.7 on new ones); and of a few held back none may be
        hard (four lines of text: sequential rounding seemed to cost 31 -> 28 dB, and brought 19 -> 23 on 160 others).
        """
        return Evaluator(self.calibration.take(_JUDGES_OF_CALIBRATION, self.seed).joined(self.validation), self.crew)

    @cached_property
    def equalizing(self) -> Dataset:
        """The samples that equalized models are calibrated for and judged on."""
        return self.calibration.take(_TRIAL).joined(self.validation)
