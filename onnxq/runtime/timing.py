"""How long models take, measured so that a ratio can be believed on a machine that does other things too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import onnx

from onnxq.graph import FLOAT_TENSORS, ValueInfo, compute_fingerprint
from onnxq.runtime.session import AnyModel, Feeds, Session

# One measurement lasts at least this long: the clock and Python then weigh nothing.
_BLOCK_SECONDS = 2e-3
_MOST_RUNS = 64
_WARM_UP_RUNS = 3
_FEWEST_ROUNDS = 3
_ENOUGH_ROUNDS = 9
_MOST_ROUNDS = 200
# Rounds go on until the medians' standard error is below this.
PRECISION = 0.005


# Some runs of one thing, one after the other: the seconds of each.
Seconds = Sequence[float]
Block = Callable[[], Seconds]
# Of all runs of one thing, round by round.
Rounds = Sequence[Seconds]
_Name = TypeVar("_Name")


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds of one run.

    times_ms: means of the rounds; the k-th rounds of all models were measured side by side. median_ms, min_ms: of
    these; p99_ms: 99 of 100 single runs took no longer.
    """

    median_ms: float
    min_ms: float
    p99_ms: float
    rounds: int
    threads: int
    times_ms: tuple[float, ...]

    @property
    def per_second(self) -> float:
        """Runs in a second, one after the other."""
        return 1e3 / (sum(self.times_ms) / len(self.times_ms))

    def speedup(self, other: Latency) -> float:
        """How many times faster this is than `other`: the median of the ratios round by round."""
        return median(b / a for a, b in zip(self.times_ms, other.times_ms, strict=True))


def summarize_rounds(rounds: Rounds, threads: int = 0) -> Latency:
    """The latency of a model from the seconds of its runs, round by round."""
    times = tuple(float(np.mean(seconds)) * 1e3 for seconds in rounds)
    return Latency(
        median_ms=median(times),
        min_ms=min(times),
        p99_ms=float(np.percentile(list(chain.from_iterable(rounds)), 99)) * 1e3,
        rounds=len(times),
        threads=threads,
        times_ms=times,
    )


def time_models(
    models: Mapping[str, AnyModel],
    feeds: Feeds,
    *,
    threads: int = 1,
    rounds: int | None = None,
    seconds: float = 8.0,
    precision: float = PRECISION,
    provider: str = "",
) -> dict[str, Latency]:
    """Time models on the same feeds, as `measure_rounds` does; the same network, by whatever names, once.

    feeds: floats are converted to the float type that a model's input has. threads: 1 is what papers call
    single-threaded; spinning is off. provider: of ONNX Runtime, "" for the CPU, whatever the models' own is.
    Raises ModelError for a model ORT refuses, DataError for feeds that do not fit.
    """
    leaders = _find_leaders(models)
    timed = {name: model for name, model in models.items() if leaders[name] == name}
    sessions = {
        name: Session(model, threads=threads, provider=provider) for name, model in timed.items()
    }
    blocks = {}
    for name, session in sessions.items():
        block = partial(time_runs, partial(session.run, convert_floats(feeds, session.inputs)))
        blocks[name] = partial(block, count_block_runs(block))
    times = measure_rounds(blocks, rounds=rounds, seconds=seconds, precision=precision)
    latencies = {name: summarize_rounds(times[name], threads) for name in times}
    return {name: latencies[leader] for name, leader in leaders.items()}


def _find_leaders(models: Mapping[str, AnyModel]) -> dict[str, str]:
    """By name, the first model of the same structure and weights."""
    leaders: dict[str, str] = {}
    for name, model in models.items():
        same = (other for other in leaders.values() if _is_same(models[other], model))
        leaders[name] = next(same, name)
    return leaders


def _is_same(model: AnyModel, other: AnyModel) -> bool:
    if isinstance(model, (str, Path)) or isinstance(other, (str, Path)):
        return model == other
    ops, other_ops = ([node.op_type for node in each.graph.node] for each in (model, other))
    # Weights are only hashed where operators agree.
    return ops == other_ops and compute_fingerprint(model) == compute_fingerprint(other)


def convert_floats(feeds: Feeds, inputs: Iterable[ValueInfo]) -> Feeds:
    """Feeds with their floats in the float types of a model's inputs, so that models of several types read the same."""
    converted = {name: np.asarray(value) for name, value in feeds.items()}
    for value in inputs:
        array = converted.get(value.name)
        # Kind V is that of bfloat16.
        if value.dtype in FLOAT_TENSORS and array is not None and array.dtype.kind in "fV":
            converted[value.name] = array.astype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype))
    return converted


def measure_rounds(
    blocks: Mapping[str, Block],
    *,
    rounds: int | None = None,
    seconds: float = 8.0,
    precision: float = PRECISION,
) -> dict[str, list[Seconds]]:
    """Seconds of every run, in paired rounds: every block once in each, in orders that `order_round` balances.

    Interleaving makes a slow moment of the machine hit all alike. rounds: how many; None measures until the medians are
    stable to `precision`, for `seconds` at most (never fewer than 3 rounds).
    """
    times: dict[str, list[Seconds]] = {name: [] for name in blocks}
    names = list(blocks)
    end = time.perf_counter() + seconds
    done = 0
    while names and not _is_finished(
        times, done, rounds, precision, late=time.perf_counter() >= end
    ):
        for name in order_round(names, done):
            times[name].append(blocks[name]())
        done += 1
    return times


def order_round(names: Sequence[_Name], turn: int) -> Sequence[_Name]:
    """The order of a round: over `2 * len(names)` rounds each name follows every other equally often.

    A model that leaves the caches full of its weights slows the one behind it by some percent. A Williams design:
    https://doi.org/10.1071/CH9490149.
    """
    steps = (-place // 2 if place % 2 else place // 2 for place in range(len(names)))
    order = [names[(turn + step) % len(names)] for step in steps]
    return order[::-1] if turn // len(names) % 2 else order


def count_block_runs(block: Block) -> int:
    """Run until caches are warm; returns how many runs make one measurement. block: of one run."""
    # The fastest: the first run also allocates and fills caches.
    fastest = min(block()[0] for _ in range(_WARM_UP_RUNS))
    return int(np.clip(np.ceil(_BLOCK_SECONDS / max(fastest, 1e-7)), 1, _MOST_RUNS))


def _is_finished(
    times: Mapping[str, list[Seconds]],
    done: int,
    rounds: int | None,
    precision: float,
    *,
    late: bool,
) -> bool:
    if rounds is not None:
        return done >= max(rounds, 1)
    if done < _FEWEST_ROUNDS:
        return False
    if late or done >= _MOST_ROUNDS:
        return True
    return done >= _ENOUGH_ROUNDS and all(
        _estimate_spread(rows) < precision for rows in times.values()
    )


def _estimate_spread(rounds: Rounds) -> float:
    """Standard error of the median relative to it, from the interquartile range."""
    # Of a normal distribution: 1.35 deviations lie between the quartiles, and 1.25 / sqrt(n) is the median's error.
    low, middle, high = np.percentile([np.mean(seconds) for seconds in rounds], (25, 50, 75))
    return float(1.25 * (high - low) / 1.35 / np.sqrt(len(rounds)) / middle)


def time_runs(run: Callable[[], object], count: int = 1) -> list[float]:
    """Seconds of each of so many runs."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
