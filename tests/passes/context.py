"""A small run context, to run a pass by itself: samples, a configuration, a clock, nothing else."""

from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.passes.base import SampledContext
from onnxq.passes.judging import SampleSets
from onnxq.passes.state import FloatState, PlacedState
from onnxq.plan import Plan
from onnxq.planner import OnnxPlacement


@dataclass
class Clock:
    """Time as the test wants it, in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def place(state: FloatState, plan: Plan, problem: OnnxPlacement | None = None) -> PlacedState:
    """The state with a plan. problem: None where only shapes are asked of it, which are unknown then."""
    return state.add_placement(problem or cast(OnnxPlacement, SimpleNamespace(ops=_NoOps())), plan)


class _NoOps(tuple[Any, ...]):
    shapes = MappingProxyType[Any, Any]({})


def make_context(calibration: Dataset, validation: Dataset | None = None, **settings: Any) -> SampledContext:
    """A context whose samples are these. settings: of the configuration, e.g. effort="high"."""
    held = calibration if validation is None else validation
    first = next(iter(held.samples()))
    samples = SampleSets(calibration, calibration, held, held, "", first, "", synthetic=False)
    config = Config(**settings)
    return SampledContext(config=config, skip=frozenset(config.skip), data=samples)
