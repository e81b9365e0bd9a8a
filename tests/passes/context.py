"""A small run context, to run a pass by itself: samples, a configuration, nothing else."""

from __future__ import annotations

from typing import Any

from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.passes.base import RunContext
from onnxq.passes.samples import Samples


def make_context(calibration: Dataset, validation: Dataset | None = None, **settings: Any) -> RunContext:
    """A context whose samples are these. settings: of the configuration, e.g. effort="high"."""
    held = calibration if validation is None else validation
    first = next(iter(held.samples()))
    samples = Samples(calibration, calibration, held, held, "", first, "", synthetic=False)
    config = Config(**settings)
    return RunContext(config=config, skip=frozenset(config.skip), samples=samples)
