"""The samples of a run: read, and parted by what they serve for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from onnxq.config import Config
from onnxq.data import Dataset, extremes, load_data
from onnxq.evaluation.accumulator import Array
from onnxq.pipeline.judging import Evaluator, judges_of
from onnxq.pipeline.prepared import PreparedModel
from onnxq.progress import Progress, counted, silent

_MOST_HELD = 16
# Of more samples than these, others are nearly as extreme as the most extreme one, and looking takes time.
_FEW = 256


@dataclass(frozen=True, eq=False)
class Inputs:
    """The samples in three sets: for rewrites and weights, for choosing between plans, for the figures reported.

    They share no sample while there are enough; `trial` is `held` where nothing is chosen. ranges: what activations are
    observed on, calibration and trial, but no more than were asked for: all plans compared have these ranges alike, and
    a range misses what it has not seen. seen: what the samples in `held` were also used for, in words, "" where nothing
    was.
    """

    calibration: Dataset
    ranges: Dataset
    trial: Dataset
    held: Dataset
    seen: str
    first: Mapping[str, Array]
    description: str
    synthetic: bool
    seed: int = 0

    @cached_property
    def judge(self) -> Evaluator:
        """Scores plans on `trial`."""
        return Evaluator(self.trial)

    @cached_property
    def judges(self) -> Evaluator:
        """Scores plans on `judging.judges_of` these samples."""
        return Evaluator(judges_of(self.calibration, self.trial, self.seed))


def read_data(
    prepared: PreparedModel, data: object, config: Config, *, choosing: bool = False, progress: Progress = silent
) -> Inputs:
    """Load the samples; hold some back for the check, and others for what has to be chosen.

    choosing: something is, whatever the configuration says.
    """
    dataset = load_data(data, prepared.before.inputs, config.data, prepared.named, progress=progress)
    count, holdout, seed = len(dataset), config.verify.holdout, config.data.seed
    usual = min(_MOST_HELD, count // 8)
    if holdout is None:
        holdout = max(1, usual)
    seen = "calibration" if holdout == 0 or count == 1 else ""
    # Two samples disagree less about a choice than one; a quarter is as much as calibration can spare.
    choice = max(1, usual, min(2, count // 4)) if (choosing or _chooses(config)) and holdout else 0
    # The loudest of 32 frames decides what a recording is clipped at: silero_vad has 18 dB with it, 14 without.
    wanted = holdout + choice
    keep: Collection[int] = ()
    if dataset.spare < wanted and count <= _FEW and not dataset.synthetic:
        with progress("looking for the extreme samples", count) as task:
            keep = extremes(counted(dataset.samples(), task))
    calibration, held = dataset.split(wanted, seed, keep)
    trial = held
    if choice and len(held) > 1:
        trial, held = held.split(holdout, seed) if len(held) > holdout else held.split(1, seed)
    elif choice:
        trial = calibration
    first = next(iter(held.samples()))
    spare = len(calibration) + len(trial) > count
    ranges = calibration if trial is held or spare else calibration.joined(trial)
    return Inputs(calibration, ranges, trial, held, seen, first, dataset.describe(), dataset.synthetic, seed)


def _chooses(config: Config) -> bool:
    """True when plans are compared on samples."""
    return config.effort != "fast" or config.attention == "auto"
