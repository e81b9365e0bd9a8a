"""The samples of a run: read, and parted by their uses."""

from __future__ import annotations

from collections.abc import Collection

from onnxq.config import Config
from onnxq.data import find_extremes, load_data
from onnxq.passes.judging import SampleSets
from onnxq.passes.state import FloatState
from onnxq.progress import Progress, count_items, silent

# Most samples held back for the check, and for choices; an eighth of all where that is fewer.
_MOST_HELD = 16
# Inputs made up where no samples are needed.
_MADE_UP = 8
# Of more samples than these, others are nearly as extreme as the most extreme one, and looking takes time.
_FEW = 256


def read_data(
    state: FloatState, data: object, config: Config, *, choosing: bool = False, progress: Progress = silent
) -> SampleSets:
    """Load the samples; hold some back for the check, and others for the choices of passes (validation samples).

    choosing: something is, whatever the configuration says.
    """
    dataset = load_data(data, state.before.inputs, config.data, state.named, progress=progress)
    count, holdout, seed = len(dataset), config.verify.holdout, config.data.seed
    if dataset.synthetic and config.mode == "dynamic":
        # Nothing is calibrated: they give shapes, and the check is fair on all of them.
        samples = dataset.take(_MADE_UP, seed)
        description = f"none needed; shapes and check: {samples.describe()}"
        return SampleSets(samples, samples, samples, samples, "", samples[0], description, True, seed)
    usual = min(_MOST_HELD, count // 8)
    if holdout is None:
        holdout = max(1, usual)
    # Two samples disagree less about a choice than one; a quarter is as much as calibration can spare.
    choice = max(1, usual, min(2, count // 4)) if (choosing or _chooses(config)) and holdout else 0
    # The loudest of 32 frames decides what a recording is clipped at: silero_vad has 18 dB with it, 14 without.
    held_back = holdout + choice
    keep: Collection[int] = ()
    if dataset.spare < held_back and count <= _FEW and not dataset.synthetic:
        with progress("looking for the extreme samples", count) as task:
            keep = find_extremes(count_items(dataset.samples(), task), held_back - dataset.spare)
    calibration, test = dataset.split(held_back, seed, keep)
    other_use = "calibration" if len(calibration.joined(test)) < len(calibration) + len(test) else ""
    validation = test
    if choice and len(test) > 1 and not other_use:
        # Fewer than are wanted are shared out alike; the check keeps one at least that nothing was chosen on.
        validation, test = test.split(max(1, len(test) * holdout // held_back), seed)
    elif choice:
        validation = calibration
    # Ranges of all compared plans are observed on the same samples, and of no more than were asked for.
    spare = len(calibration) + len(validation) > count
    ranges = calibration if validation is test or spare else calibration.joined(validation)
    description = dataset.describe()
    if config.runtime.provider:
        description += f"; run on {config.runtime.provider}"
    if (config.verify.holdout or 0) > len(test):
        shortage = f"{len(test)} samples are held back where {config.verify.holdout} were asked for"
        description += f"; {shortage}: ranges hang on the others"
    first, synthetic = dataset[0], dataset.synthetic
    return SampleSets(calibration, ranges, validation, test, other_use, first, description, synthetic, seed)


def _chooses(config: Config) -> bool:
    """True when plans are compared on samples."""
    return config.effort != "fast" or config.attention == "auto"
