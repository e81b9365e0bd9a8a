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
        few = dataset.take(_MADE_UP, seed)
        told = f"none needed; shapes and check: {few.describe()}"
        return SampleSets(few, few, few, few, "", few[0], told, True, seed)
    usual = min(_MOST_HELD, count // 8)
    if holdout is None:
        holdout = max(1, usual)
    # Two samples disagree less about a choice than one; a quarter is as much as calibration can spare.
    choice = max(1, usual, min(2, count // 4)) if (choosing or _chooses(config)) and holdout else 0
    # The loudest of 32 frames decides what a recording is clipped at: silero_vad has 18 dB with it, 14 without.
    wanted = holdout + choice
    keep: Collection[int] = ()
    if dataset.spare < wanted and count <= _FEW and not dataset.synthetic:
        with progress("looking for the extreme samples", count) as task:
            keep = find_extremes(count_items(dataset.samples(), task), wanted - dataset.spare)
    calibration, held = dataset.split(wanted, seed, keep)
    seen = "calibration" if len(calibration.joined(held)) < len(calibration) + len(held) else ""
    trial = held
    if choice and len(held) > 1 and not seen:
        # Fewer than are wanted are shared out alike; the check keeps one at least that nothing was chosen on.
        trial, held = held.split(max(1, len(held) * holdout // wanted), seed)
    elif choice:
        trial = calibration
    # Ranges of all compared plans are observed on the same samples, and of no more than were asked for.
    spare = len(calibration) + len(trial) > count
    ranges = calibration if trial is held or spare else calibration.joined(trial)
    provider = config.runtime.provider
    description = dataset.describe() + (f"; run on {provider}" if provider else "")
    if (config.verify.holdout or 0) > len(held):
        asked = f"{len(held)} samples are held back where {config.verify.holdout} were asked for"
        description += f"; {asked}: ranges hang on the others"
    return SampleSets(calibration, ranges, trial, held, seen, dataset[0], description, dataset.synthetic, seed)


def _chooses(config: Config) -> bool:
    """True when plans are compared on samples."""
    return config.effort != "fast" or config.attention == "auto"
