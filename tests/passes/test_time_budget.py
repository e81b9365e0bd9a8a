"""A budget in steps of a clock: shares, samples that fit, and what gave way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx

from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.graph import ValueInfo
from onnxq.passes.journal import Shortage, Shortened
from onnxq.passes.time_budget import TimeBudget
from onnxq.progress import OutOfTime, Progress, silent


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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


def attempt(made: TimeBudget, name: str, share: float, work: Callable[[Progress], str]) -> str:
    """The result of the work; "before" where it is left out or given up."""
    done = "before"
    with made.limit(name, share, silent) as progress:
        if progress is not None:
            done = work(progress)
    return done


def test_a_pass_is_given_up_after_its_share_and_at_most_one_step_more() -> None:
    made, clock = budget(11)
    assert attempt(made, "sweep", 0.5, steps(clock, 100, 0.4)) == "before"
    assert 5.0 <= made.spent() <= 5.4 + 1e-9
    assert made.shortened == [Shortened("sweep", Shortage.GIVEN_UP, 11, 5.0)]
    assert attempt(made, "promotion", 0.5, steps(clock, 2, 0.4)) == "done"


def test_what_has_no_time_is_left_out() -> None:
    made, clock = budget(2)
    clock.now += 0.9
    assert attempt(made, "sweep", 0.5, steps(clock, 1, 0)) == "before"
    assert (made.shortened[0].name, made.shortened[0].how) == ("sweep", Shortage.LEFT_OUT)


def test_without_a_limit_nobody_looks_at_the_clock() -> None:
    made = TimeBudget(None, clock=Clock())
    work = steps(Clock(), 1000, 100.0)
    assert attempt(made, "sweep", 0.1, work) == "done"
    assert made.shortened == []
    assert not made.over()


def test_calibration_takes_as_many_samples_as_fit() -> None:
    x = ValueInfo("x", onnx.TensorProto.FLOAT, (1, 2))
    data = load_data({"x": np.zeros((40, 1, 2), np.float32)}, [x], DataConfig())
    made, clock = budget(11)
    seen = []

    def work(samples, progress: Progress) -> int:
        seen.append(len(samples))
        steps(clock, len(samples), 0.5)(progress)
        return len(samples)

    count = made.fitting("calibration", data, 0, silent, work)
    assert 1 <= count < 40
    assert seen[0] == 40
    assert seen[-1] == count
    assert made.spent() <= 11
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (count, 40))


def test_one_sample_is_always_checked() -> None:
    made, clock = budget(2)
    clock.now += 5

    x = ValueInfo("x", onnx.TensorProto.FLOAT, (1, 2))
    data = load_data({"x": np.zeros((5, 1, 2), np.float32)}, [x], DataConfig())
    assert len(list(made.take_while_left("check", data))) == 1
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (1, 5))


def test_nothing_but_the_budget_catches_it() -> None:
    from onnxq.errors import OnnxqError

    assert not issubclass(OutOfTime, OnnxqError)


def test_promotion_keeps_the_steps_it_made() -> None:
    made, clock = budget(100)
    from onnxq.passes.mixed_precision.search import PromotionSearch

    class Search:
        late = False

        @staticmethod
        def is_expired() -> bool:
            return made.left() <= 0

        def find_steps(self) -> Iterator[str]:
            for k in range(10):
                clock.now += 30
                yield f"step {k}"

        take_steps = PromotionSearch.take_steps
        explain_end = PromotionSearch.explain_end

    search = Search()
    assert list(search.take_steps()) == ["step 0", "step 1", "step 2", "step 3"]  # type: ignore[misc]
    assert search.explain_end() == "the budget ran out"  # type: ignore[misc]
