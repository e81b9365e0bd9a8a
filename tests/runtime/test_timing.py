"""Timings: paired, bounded, of the right nodes."""

import time
from collections import Counter
from functools import partial
from itertools import pairwise, permutations

import numpy as np
import onnx
import pytest

from onnxq.errors import DataError
from onnxq.runtime import time_models
from onnxq.runtime.timing import measure_rounds
from tests.codes.kit import model


def matmuls(count: int, size: int = 192) -> onnx.ModelProto:
    nodes = " ".join(f"t{k + 1} = MatMul(t{k}, w)" for k in range(count))
    shape = f"float[{size},{size}]"
    return model(f"g ({shape} t0) => ({shape} t{count}) {{ {nodes} }}", w=np.full((size, size), 1 / size, np.float32))


X = {"t0": np.ones((192, 192), np.float32)}


def test_more_work_takes_longer_and_rounds_are_paired() -> None:
    found = time_models({"short": matmuls(1), "long": matmuls(12)}, X, rounds=5)
    short, long = found["short"], found["long"]
    assert short.rounds == long.rounds == len(short.times_ms) == len(long.times_ms) == 5
    assert short.min_ms <= short.median_ms
    assert short.speedup(long) > 2
    assert short.speedup(long) == pytest.approx(1 / long.speedup(short), rel=0.5)
    assert short.threads == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_in_rounds_each_model_follows_every_other_equally_often(count: int) -> None:
    names = [f"m{place}" for place in range(count)]
    order: list[str] = []

    def note(name: str) -> list[float]:
        order.append(name)
        return [1.0]

    measure_rounds({name: partial(note, name) for name in names}, rounds=2 * count)
    rounds = [order[start : start + count] for start in range(0, len(order), count)]
    assert len(rounds) == 2 * count
    assert all(sorted(row) == names for row in rounds)
    assert Counter(row[0] for row in rounds) == dict.fromkeys(names, 2)
    pairs = Counter(pair for row in rounds for pair in pairwise(row))
    assert pairs == dict.fromkeys(permutations(names, 2), 2)


def test_without_rounds_time_is_bounded() -> None:
    start = time.perf_counter()
    found = time_models({"a": matmuls(2), "b": matmuls(2)}, X, seconds=0.3)
    assert time.perf_counter() - start < 5
    assert found["a"].rounds >= 3


def test_the_same_network_is_timed_once_whatever_its_names() -> None:
    renamed = matmuls(2)
    for node in renamed.graph.node:
        node.name += "/again"
        node.metadata_props.add(key="note", value="other")
    other = matmuls(2)
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((192, 192), np.float32), "w"))
    found = time_models({"a": matmuls(2), "b": renamed, "c": other, "d": matmuls(1)}, X, rounds=3)
    assert list(found) == ["a", "b", "c", "d"]
    assert found["a"].times_ms == found["b"].times_ms
    assert found["a"].speedup(found["b"]) == 1.0
    assert len({one.times_ms for one in found.values()}) == 3


def test_feeds_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match="t0"):
        time_models({"a": matmuls(1)}, {"t0": np.ones((3, 3), np.float32)}, rounds=1)
