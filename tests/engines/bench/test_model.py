"""Benches as values: what failed, how types are counted, and ratios to the first model."""

from dataclasses import replace

import pytest

from onnxq.backends.engine import BuildState, Untimed
from onnxq.engines.bench import Bench, BenchedModel
from onnxq.runtime import Latency
from tests.commands.test_prove import PROOF

REFUSED = replace(PROOF, build=replace(PROOF.build, state=BuildState.REFUSED))


def latency(*times: float) -> Latency:
    return Latency(
        median_ms=times[0], min_ms=min(times), p99_ms=max(times), rounds=len(times), threads=1, times_ms=times
    )


def bench(*models: BenchedModel, untimed: Untimed | None = None) -> Bench:
    return Bench(engine="tensorrt", version="", models=models, untimed=untimed)


def test_the_faster_way_counts() -> None:
    one = BenchedModel(name="a", eager=latency(2.0, 2.0), graph=latency(1.0, 1.0))
    other = BenchedModel(name="b", eager=latency(4.0, 2.0))
    assert one.best == one.graph
    found = bench(one, other)
    assert found.ratio(one) == 1.0
    assert found.ratio(other) == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert found.failed == ()


def test_models_that_were_not_built_or_not_timed_failed() -> None:
    good, bad = BenchedModel(name="a", proof=PROOF, eager=latency(1.0)), BenchedModel(name="b", proof=REFUSED)
    slow = BenchedModel(name="c", proof=PROOF, reason="it crashed")
    assert bench(good, bad, slow).failed == (bad, slow)
    # Where nothing is timed, only builds can fail.
    assert bench(good, bad, slow, untimed=Untimed.NO_GPU).failed == (bad,)
    assert bench(good, slow).ratio(slow) is None


def test_heavy_nodes_are_counted_by_type() -> None:
    assert BenchedModel(name="a", proof=PROOF).types == {"int8": 1, "float32": 1}
    assert not BenchedModel(name="a").types
    assert BenchedModel(name="a").built
