"""How long models take, measured so that a ratio can be believed on a machine that does other things too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from onnxq.graph import ModelLike
from onnxq.runtime.session import Feeds, Session

# One measurement lasts at least this long: the clock and Python then weigh nothing.
_BLOCK_SECONDS = 2e-3
_MOST_RUNS = 64
_WARM_UP_RUNS = 3
_FEWEST_ROUNDS, _ENOUGH_ROUNDS, _MOST_ROUNDS = 3, 9, 200
# Rounds go on until the medians' standard error is below this.
_PRECISION = 0.005


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds of one run. times_ms: one per round; the k-th rounds of all models were measured side by side."""

    median_ms: float
    min_ms: float
    rounds: int
    threads: int
    times_ms: tuple[float, ...]

    def speedup(self, other: Latency) -> float:
        """How many times faster this is than `other`: the median of the ratios round by round."""
        return median(b / a for a, b in zip(self.times_ms, other.times_ms, strict=True))


def time_models(
    models: Mapping[str, ModelLike | str | Path],
    feeds: Feeds,
    *,
    threads: int = 1,
    rounds: int | None = None,
    seconds: float = 8.0,
) -> dict[str, Latency]:
    """Time models on the same feeds: paired rounds, every model once in each, in an order that rotates.

    Interleaving makes a slow moment of the machine hit all models alike. rounds: how many; None measures until the
    medians are stable to 0.5 %, for `seconds` at most (never fewer than 3 rounds). threads: 1 is what papers call
    single-threaded; spinning is off.
    Raises ModelError for a model ORT refuses, DataError for feeds that do not fit.
    """
    sessions = {name: Session(model, threads=threads) for name, model in models.items()}
    runs = {name: _warm_up_session(session, feeds) for name, session in sessions.items()}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    names = list(sessions)
    end = time.perf_counter() + seconds
    done = 0
    while names and not _is_finished(times, done, rounds, time.perf_counter() >= end):
        turn = done % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(_time_runs(sessions[name], feeds, runs[name]))
        done += 1
    return {
        name: Latency(
            median_ms=median(found) * 1e3,
            min_ms=min(found) * 1e3,
            rounds=done,
            threads=threads,
            times_ms=tuple(one * 1e3 for one in found),
        )
        for name, found in times.items()
    }


def _is_finished(times: Mapping[str, list[float]], done: int, rounds: int | None, late: bool) -> bool:
    if rounds is not None:
        return done >= max(rounds, 1)
    if done < _FEWEST_ROUNDS:
        return False
    if late or done >= _MOST_ROUNDS:
        return True
    return done >= _ENOUGH_ROUNDS and all(_estimate_spread(found) < _PRECISION for found in times.values())


def _estimate_spread(times: list[float]) -> float:
    """Standard error of the median relative to it, from the interquartile range."""
    # Of a normal distribution: 1.35 deviations lie between the quartiles, and 1.25 / sqrt(n) is the median's error.
    low, middle, high = np.percentile(times, (25, 50, 75))
    return float(1.25 * (high - low) / 1.35 / np.sqrt(len(times)) / middle)


def _warm_up_session(session: Session, feeds: Feeds) -> int:
    """Run until caches are warm; returns how many runs make one measurement."""
    # The fastest: the first run also allocates and fills caches.
    fastest = min(_time_runs(session, feeds, 1) for _ in range(_WARM_UP_RUNS))
    return int(np.clip(np.ceil(_BLOCK_SECONDS / max(fastest, 1e-7)), 1, _MOST_RUNS))


def _time_runs(session: Session, feeds: Feeds, runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        session.run(feeds)
    return (time.perf_counter() - start) / runs
