"""Sketches of tensors: equal for a tensor turned and reshaped, different for another, and the same after JSON."""

import math

import numpy as np
import pytest

from onnxq.plan.contents import CONSTANT_TOLERANCE, Feed, make_feeds, read_sketch, sketch_values

VALUES = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)


def test_turned_and_reshaped() -> None:
    first, other = sketch_values(VALUES), sketch_values(VALUES.transpose(2, 0, 1).reshape(12, 5))
    assert first.measure_distance(other) < 1e-12
    assert first.is_alike(sketch_values(VALUES * (1 + 1e-5)))
    assert not first.is_alike(sketch_values(VALUES * 1.01))
    assert not first.is_alike(sketch_values(-VALUES))
    assert first.measure_distance(sketch_values(VALUES[1:])) == math.inf


def test_constants_must_agree_more() -> None:
    first, other = (sketch_values(values, constant=True) for values in (VALUES, VALUES * (1 + 5 * CONSTANT_TOLERANCE)))
    assert not first.is_alike(other)
    assert first.is_alike(sketch_values(VALUES * (1 + 5 * CONSTANT_TOLERANCE)))


def test_text_and_back() -> None:
    for constant in (False, True):
        sketch = sketch_values(VALUES, constant=constant)
        assert str(read_sketch(str(sketch))) == str(sketch)
        assert sketch.is_alike(read_sketch(str(sketch)))
    with pytest.raises(ValueError, match="five finite figures"):
        read_sketch("3 1 2")


def test_infinite_values_and_none() -> None:
    assert sketch_values(np.array([-np.inf, 0.0])).lowest == -1e4
    assert sketch_values(np.zeros(0)).size == 0
    assert sketch_values(np.zeros(3)).measure_distance(sketch_values(np.zeros(3))) == 0


def test_feeds_are_seeded_and_within_bounds() -> None:
    feeds = {"x": Feed("float32", (2, 3)), "ids": Feed("int64", (50,), 0, 7), "on": Feed("bool", (4,), 1, 2)}
    one, two = make_feeds(feeds), make_feeds(feeds)
    assert all(np.array_equal(one[name], two[name]) for name in feeds)
    assert set(one["ids"].tolist()) == set(range(7))
    assert one["on"].all()
    assert [one[name].dtype.name for name in feeds] == ["float32", "int64", "bool"]
