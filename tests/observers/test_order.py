"""The promise of streaming: only the set of values counts, not their order, batches or the tree of merges."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxq.observers import create_observer, list_observers
from onnxq.spec import ObserverSpec, QuantSpec

SPECS = (
    QuantSpec(),
    QuantSpec(bits=4),
    QuantSpec(signed=False, symmetric=False),
    QuantSpec(bits=3, signed=False, symmetric=False),
    QuantSpec(bits=16, signed=False, symmetric=False),
)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def _values(draw: Any) -> Any:
    """Few awkward values and many ordinary ones: any exponent, zeros, one or two signs, outliers, constants."""
    awkward = draw(hnp.arrays(np.float32, st.integers(0, 12), elements=FINITE))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 3000))
    body = rng.standard_normal(n) * 10.0 ** rng.uniform(-40, 30, n if draw(st.booleans()) else 1)
    kind = draw(st.sampled_from(["both", "relu", "negative", "constant", "clipped"]))
    if kind == "relu":
        body, awkward = np.maximum(body, 0), np.abs(awkward)
    elif kind == "negative":
        body, awkward = -np.abs(body), -np.abs(awkward)
    elif kind == "constant":
        body = np.full(n, body[0])
    elif kind == "clipped":
        body = np.clip(body, -np.abs(body[0]), np.abs(body[-1]))
    return np.concatenate([body.astype(np.float32), awkward])


def _cut(draw: Any, values: Any) -> list[Any]:
    places = sorted(draw(st.lists(st.integers(0, values.size), max_size=6)))
    return np.split(values, places)


def _grown(draw: Any, name: str, quant: QuantSpec, batches: list[Any]) -> tuple[bytes, int]:
    """One observer per few batches, then merged two by two in any order."""
    observers = []
    for batch in batches:
        if not observers or draw(st.booleans()):
            observers.append(create_observer(ObserverSpec(name), quant))
        observers[draw(st.integers(0, len(observers) - 1))].update(batch)
    while len(observers) > 1:
        taken = observers.pop(draw(st.integers(0, len(observers) - 1)))
        observers[draw(st.integers(0, len(observers) - 1))].merge(taken)
    low, high = observers[0].range()
    assert low.shape == high.shape == ()
    assert low.dtype == high.dtype == np.float64
    return low.tobytes() + high.tobytes(), observers[0].count


@pytest.mark.parametrize("name", [n for n in list_observers() if n != "moving_average"])
@settings(max_examples=40)
@given(data=st.data())
def test_any_order_any_batches_any_merges_give_the_same_bits(name: str, data: Any) -> None:
    quant = data.draw(st.sampled_from(SPECS))
    values = data.draw(_values())
    once = _grown(data.draw, name, quant, [values])
    shuffled = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).permutation(values)
    assert _grown(data.draw, name, quant, _cut(data.draw, shuffled)) == once
    assert once[1] == values.size


@settings(max_examples=60)
@given(data=st.data())
def test_the_mean_of_samples_does_not_depend_on_their_order(data: Any) -> None:
    samples = [s for s in _cut(data.draw, data.draw(_values())) if s.size]
    once = _grown(data.draw, "moving_average", QuantSpec(), samples)
    assert _grown(data.draw, "moving_average", QuantSpec(), data.draw(st.permutations(samples))) == once


@pytest.mark.parametrize("name", list_observers())
@settings(max_examples=30)
@given(data=st.data())
def test_the_range_lies_inside_what_was_seen(name: str, data: Any) -> None:
    values = data.draw(_values())
    observer = create_observer(ObserverSpec(name), data.draw(st.sampled_from(SPECS)))
    observer.update(values)
    low, high = observer.range()
    assert values.min() <= low <= high <= values.max()


@pytest.mark.parametrize("name", list_observers())
def test_negative_zero_is_zero(name: str) -> None:
    ends = set()
    for order in ([0.0, -0.0, 2.0], [-0.0, 0.0, 2.0], [2.0, -0.0, -0.0]):
        observer = create_observer(ObserverSpec(name), QuantSpec())
        observer.update(np.float32(order))
        ends.add(b"".join(end.tobytes() for end in observer.range()))
    assert len(ends) == 1
