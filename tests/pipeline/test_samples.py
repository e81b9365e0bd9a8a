"""Which samples serve for what: the figure reported must be of samples that nothing was chosen on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.backends import load_config
from onnxq.config import Config
from onnxq.pipeline.prepared import load_state, read_data
from tests.codes.kit import quantized
from tests.graph.kit import model

PREPARED = load_state(model("g (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }"))
CONFIG = load_config("ort-int8", {"effort": "balanced"})


def _ids(dataset) -> set[float]:
    return {float(sample["x"][0, 0]) for sample in dataset.samples()}


def _inputs(count: int, config: Config = CONFIG):
    """Samples that are each full of their number."""
    data = np.repeat(np.arange(count, dtype=np.float32)[:, None, None], 4, axis=2)
    return read_data(PREPARED, {"x": data}, config)


@given(count=st.integers(4, 200))
def test_three_disjoint_sets_where_two_samples_beside_the_extremes_are_free(count: int) -> None:
    inputs = _inputs(count)
    sets = [_ids(part) for part in (inputs.calibration, inputs.validation, inputs.test)]
    assert all(sets)
    assert sum(map(len, sets)) == len(set.union(*sets)) == count
    assert inputs.seen == ""
    assert len(sets[0]) >= len(sets[1]) >= len(sets[2])
    assert len(sets[1]) <= 16


@pytest.mark.parametrize("count", [1, 2, 3])
def test_too_few_samples_are_used_twice_and_never_none(count: int) -> None:
    """The least and the greatest are for the ranges, so that of three samples one is left for the check."""
    inputs = _inputs(count)
    sets = [_ids(part) for part in (inputs.calibration, inputs.validation, inputs.test)]
    assert all(sets)
    assert sets[0] == sets[1]
    assert bool(sets[1] & sets[2]) == (count < 3)
    assert inputs.seen == ("calibration" if count < 3 else "")


@pytest.mark.parametrize(("holdout", "note"), [(4, ""), (7, "; 6 samples are held back where 7 were asked for")])
def test_fewer_than_were_asked_for_are_told(holdout: int, note: str) -> None:
    config = load_config("ort-int8", {"verify.holdout": holdout, "effort": "fast"})
    inputs = _inputs(8, config)
    assert inputs.description.partition("8 samples")[2].startswith(note)
    assert len(inputs.test) == min(holdout, 6)


def test_nothing_is_kept_for_choices_where_nothing_is_chosen() -> None:
    inputs = _inputs(32, load_config("ort-int8", {"effort": "fast"}))
    assert len(inputs.calibration) == 28
    assert _ids(inputs.validation) == _ids(inputs.test)
    assert _ids(inputs.ranges) == _ids(inputs.calibration)


def test_what_samples_leaves_over_is_used_first() -> None:
    inputs = _inputs(64, load_config("ort-int8", {"data.samples": 16}))
    assert len(inputs.calibration) == len(inputs.ranges) == 16
    assert len(_ids(inputs.validation) | _ids(inputs.test)) == 4


def test_holdout_0_says_that_the_samples_were_seen() -> None:
    inputs = _inputs(8, load_config("ort-int8", {"effort": "balanced", "verify.holdout": 0}))
    assert len(inputs.test) == 8
    assert inputs.seen == "calibration"


def test_ranges_are_seen_on_everything_but_what_is_reported_on() -> None:
    inputs = _inputs(48)
    ranges, trial, held = (_ids(part) for part in (inputs.ranges, inputs.validation, inputs.test))
    assert ranges | held == {float(k) for k in range(48)}
    assert trial <= ranges
    assert not held & ranges


def test_scores_that_can_only_be_of_one_side_are_told() -> None:
    # Nothing of a Softmax, nor of a gate inside the network, hangs on the side of 0.
    text = """g (float[N,64] x) => (float[N,64] u, float[A,64] v, float[N,64] w, float[N,64] y, float[N,64] z) {
        low = Add(x, below) u = Sigmoid(low) high = Add(x, above) s = Sigmoid(high) v = Reshape(s, sizes)
        both = Add(x, around) w = Sigmoid(both) choice = Add(x, below_too) y = Softmax(choice)
        gate = Add(x, far_below) t = Sigmoid(gate) z = Mul(t, x) }"""
    biases = {"below": -9.0, "above": 9.0, "around": 0.5, "below_too": -10.0, "far_below": -11.0}
    result = quantized(model(text, **biases, sizes=np.asarray([-1, 64])), config="qnn-int8")
    paired = {site.quantized_tensor.name for site in result.plan.sites}
    assert paired >= {"low", "high", "both", "choice", "gate"}
    (warning,) = (warning for warning in result.report.warnings if warning.code == "W150")
    assert "in all samples (high, low)" in warning
