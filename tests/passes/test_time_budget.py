"""A budget in steps of a clock: shares, samples that fit, and what gave way."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.errors import OnnxqError
from onnxq.graph import ValueInfo
from onnxq.passes.journal import Shortage
from onnxq.passes.mixed_precision.program import PrecisionProgram
from onnxq.passes.mixed_precision.promotion_search import PromotionSearch
from onnxq.passes.time_budget import TimeBudget
from onnxq.progress import OutOfTime, Progress, silent
from tests.passes.context import Clock


def budget(seconds: float, reserve: float = 1.0) -> tuple[TimeBudget, Clock]:
    clock = Clock()
    made = TimeBudget(seconds, clock)
    made.reserve = reserve
    return made, clock


def steps(clock: Clock, count: int, each: float):
    def work(progress: Progress) -> str:
        with progress("work", count) as task:
            for _ in range(count):
                clock.now += each
                task.advance()
        return "done"

    return work


def test_without_a_limit_nobody_looks_at_the_clock() -> None:
    made = TimeBudget(None, clock=Clock())
    with made.limit("rounding", 0.1, silent) as progress:
        assert progress is not None
        assert steps(Clock(), 1000, 100.0)(progress) == "done"
    assert made.shortened == []
    assert not made.over()


def make_data(count: int) -> Dataset:
    x = ValueInfo("x", onnx.TensorProto.FLOAT, (1, 2))
    return load_data({"x": np.zeros((count, 1, 2), np.float32)}, [x], DataConfig())


def test_calibration_takes_as_many_samples_as_fit() -> None:
    made, clock = budget(11)
    # A second is kept for what must follow.
    assert made.left() == 10
    seen = []

    def work(samples, progress: Progress) -> int:
        seen.append(len(samples))
        steps(clock, len(samples), 0.5)(progress)
        return len(samples)

    count = made.fitting("calibration", make_data(40), 0, silent, work)
    assert 1 <= count < 40
    assert seen[0] == 40
    assert seen[-1] == count
    assert made.spent() <= 11
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (count, 40))


def test_one_sample_is_always_checked() -> None:
    made, clock = budget(2)
    clock.now += 5
    assert len(list(made.take_while_left("check", make_data(5)))) == 1
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (1, 5))


def test_nothing_but_the_budget_catches_it() -> None:
    assert not issubclass(OutOfTime, OnnxqError)


def test_promotion_takes_the_best_that_was_judged_in_time() -> None:
    made, clock = budget(100)
    proposals = iter(frozenset(str(k) for k in range(count)) for count in range(1, 10))

    class Search(PromotionSearch):
        def __init__(self) -> None:
            self.late, self._noises, self.program = False, {}, PrecisionProgram({})  # type: ignore[misc]

        def is_expired(self) -> bool:
            return made.left() <= 0

        def _propose_keys(self, *_: object, **__: object) -> frozenset[str]:
            return next(proposals)

        ways: Any = SimpleNamespace(to="float")

    def judge(keys: frozenset[str]) -> float:
        clock.now += 30
        return -abs(len(keys) - 2.0)

    search = Search()
    met = search.meet_figure(judge, 1.0)
    assert (len(met.keys), met.holds, len(met.figures)) == (2, False, 4)
    assert search.explain_end() == "the budget ran out"
