"""Error sums: equal to the formulas, blind to how samples are cut up, and never good where a number is missing."""

import json
import math

import numpy as np
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.commands.diff import describe_unmet
from onnxq.commands.results import show, write_json
from onnxq.evaluation.accumulator import (
    ErrorAccumulator,
    OutputAccuracy,
    SliceSums,
    measure_error,
    relative_noise,
    sum_squares,
)
from onnxq.evaluation.compare import compare_models
from tests.evaluation.heads import head, samples
from tests.pipeline.models import quantize
from tests.report.kit import shown


def test_hand_computed_values() -> None:
    found = measure_error(np.array([3.0, -4.0]), np.array([3.0, -3.0]))
    assert found.max_abs == 1.0
    assert found.sqnr_db == pytest.approx(10 * np.log10(25))
    assert found.cosine == pytest.approx((9 + 12) / (5 * np.sqrt(18)))


def test_identical_zero_and_empty_arrays() -> None:
    x, empty = np.arange(5.0), np.zeros((0, 3))
    for same in (x, x * 0, empty):
        found = measure_error(same, same)
        assert (found.sqnr_db, found.max_abs) == (np.inf, 0.0)
        assert found.cosine == pytest.approx(1.0)
    lost = measure_error(x * 0, x)
    assert lost.sqnr_db < -1000
    assert lost.cosine == 0.0
    assert measure_error(x, -x).cosine == pytest.approx(-1.0)


def test_float16_and_int8_do_not_overflow() -> None:
    a = np.full(1000, 60000, np.float16)
    sums = ErrorAccumulator()
    sums.update(a, -a)
    assert sums.noise / a.size == (2 * float(a[0])) ** 2
    assert measure_error(np.int8([127]), np.int8([-128])).max_abs == 255.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_never_looks_good(bad: float) -> None:
    x = np.arange(1.0, 5.0)
    y = x.copy()
    y[2] = bad
    sums = ErrorAccumulator("y")
    sample = sums.update(x, y)
    assert sample.noise == sample.max_abs == np.inf
    sums.update(x, x)
    found = sums.result()
    assert (found.sqnr_db, found.cosine, found.max_abs) == (-np.inf, 0.0, np.inf)


def test_where_the_reference_is_not_finite_nothing_counts() -> None:
    x, y = np.array([1.0, np.inf, 3.0]), np.array([1.0, 7.0, 2.0])
    assert repr(measure_error(x, y)) == repr(measure_error(x[[0, 2]], y[[0, 2]]))


def test_shapes_must_agree() -> None:
    assert measure_error(np.ones(3), np.ones((3, 1))).sqnr_db == -np.inf


def test_sums_do_not_depend_on_how_samples_are_cut() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3, 4)).astype(np.float32)
    y = x + rng.standard_normal(x.shape).astype(np.float32) / 10
    cut = ErrorAccumulator()
    peaks = [sample.peak for k in range(8) if (sample := cut.update(x[k], y[k])) is not None]
    assert peaks == [np.abs(one).max() for one in x]
    whole, parts = measure_error(x, y), cut.result()
    assert parts.max_abs == whole.max_abs
    assert (parts.sqnr_db, parts.cosine) == pytest.approx((whole.sqnr_db, whole.cosine))


def test_the_largest_of_each_row_are_counted_where_that_is_asked_for() -> None:
    reference = np.array([[3.0, 2.0, 1.0], [-np.inf, 0.5, 0.25], [1.0, 2.0, 0.0]])
    value = np.array([[2.0, 3.0, 1.0], [9.0, 0.5, 0.25], [1.0, np.nan, 0.0]])
    whole, parts = ErrorAccumulator(top_k=1), ErrorAccumulator(top_k=1)
    whole.update(reference, value)
    for row in range(3):
        one = ErrorAccumulator(top_k=1)
        one.update(reference[row : row + 1], value[row : row + 1])
        parts.add(one)
    assert (whole.result().top_k, whole.result().rows) == (0.0, 3)
    assert parts.result().top_k == 0.0
    assert np.isnan(measure_error(reference, reference).top_k)
    again = ErrorAccumulator(top_k=2)
    again.update(reference[:1], value[:1])
    assert again.result().top_k == 1.0


# ---- Noise over signal in float32: as exact as a search needs, and over as soon as it is lost.


def test_relative_noise() -> None:
    assert relative_noise([0.25, 0.5], 25.0) == pytest.approx(0.03)
    assert relative_noise([0.0], 0.0) == 0.0


def test_errors_are_summed_as_their_squares_are() -> None:
    exact, got = np.random.default_rng(0).standard_normal((2, 300, 101)).astype(np.float32)
    assert sum_squares(got, exact) == sum_squares(got - exact)
    assert sum_squares(got[:0], exact[:0]) == 0.0


def test_long_sums_stay_exact() -> None:
    values = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32) + 100
    assert sum_squares(values) == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-6)


def test_the_rest_is_not_computed_once_it_is_beyond_the_limit() -> None:
    noises = iter([4.0, 4.0, 4.0])
    assert relative_noise(noises, 12.0, most=0.1) == np.inf
    assert len([*noises]) == 2


RNG = np.random.default_rng(0)


def noisy(reference: np.ndarray, share: float | np.ndarray) -> np.ndarray:
    """The reference with an error of this share of 1 in every value."""
    return reference + share * np.where(RNG.random(reference.shape) < 0.5, -1.0, 1.0)


def measured(reference: np.ndarray, value: np.ndarray) -> OutputAccuracy:
    """The errors over [samples, 1, ...]."""
    sums = ErrorAccumulator("y", slices=SliceSums())
    for one, other in zip(reference, value, strict=True):
        sums.update(one, other)
    return sums.result()


def columns(*scales: float, count: int = 8, positions: int = 16, low: float = -1.0) -> np.ndarray:
    """[count, 1, columns, positions] with values to these scales along the columns."""
    values = RNG.uniform(low, 1.0, (count, 1, len(scales), positions))
    values[..., 0] = 1.0
    return values * np.array(scales)[:, None]


def test_a_part_has_its_own_figure_and_a_name() -> None:
    reference = columns(640, 640, 640, 640, 0.9, 0.5, 0.2)
    found = measured(reference, noisy(reference, np.array([4.0] * 4 + [0.05] * 3)[:, None]))
    scores = reference[:, :, 4:]
    expected = 10 * np.log10(np.square(scores).sum() / (0.05**2 * scores.size))
    assert found.part == "[:, 4:, :]"
    assert found.sqnr_db == pytest.approx(expected)
    assert found.whole_db == pytest.approx(10 * np.log10(np.square(reference).sum() / (4.0**2 * 4 * 16 * 8)), abs=0.01)
    assert found.whole_db > found.sqnr_db + 10


def test_where_the_whole_is_farther_it_is_the_figure() -> None:
    reference = columns(640, 640, 0.9, 0.5)
    found = measured(reference, noisy(reference, np.array([60.0, 60.0, 0.001, 0.001])[:, None]))
    assert found.part == ""
    assert found.sqnr_db == found.whole_db


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        pytest.param(columns(9, 4, 2, 1), "all alike", id="like scales"),
        pytest.param(columns(1, 0.3, 1e-3, 1e-4, low=0.0), "probabilities, most classes in no sample", id="scores"),
        pytest.param(columns(640, 640, 640, 1e-3), "padding and dead channels", id="dead"),
        pytest.param(columns(640, 640, 640, 0.0), "exact zeros", id="zero"),
        pytest.param(columns(*[5.0] * 99, 0.1), "one channel of a hundred that happens to be small", id="single"),
        pytest.param(columns(5.0, 0.1, count=1, positions=4), "four values do not tell a scale", id="few values"),
        pytest.param(columns(*[5.0, 0.1] * 2500, count=1), "positions, not channels", id="long"),
        pytest.param(columns(640, 0.5).astype(np.int64), "integers have no scale", id="integers"),
        pytest.param(np.swapaxes(columns(640, 0.9), 1, 2), "the batch", id="batch"),
    ],
)
def test_what_is_merely_small_is_no_part(reference: np.ndarray, why: str) -> None:
    found = measured(reference, reference + 0.001 if reference.dtype.kind == "f" else reference + 1)
    assert found.part == "", why
    assert found.sqnr_db == found.whole_db


def test_an_axis_whose_size_changes_is_left_out() -> None:
    sums = ErrorAccumulator("y", slices=SliceSums())
    for size in (2, 3):
        reference = columns(*[640, 0.5, 0.5][:size])[0]
        sums.update(reference, noisy(reference, 0.1))
    assert sums.result().part == ""


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ([0.5, 640], "[:, 0, :]"),
        ([0.5, 0.5, 640], "[:, :2, :]"),
        ([640, 0.5, 0.5, 640], "[:, 1:3, :]"),
        ([640, 640, 0.5] * 3, "[:, 2::3, :]"),
        ([640, 0.5, 640, 640, 0.5, 0.5, 640], "[:, (1, 4:6), :]"),
        ([640, 0.5, 640, 640, 0.5, 0.5, 640, 0.5, 640, 0.5, 640], "[:, (1, 4:6, 7, …), :]"),
    ],
)
def test_parts_are_named_as_numpy_takes_them(scales: list[float], text: str) -> None:
    reference = columns(*scales)
    assert measured(reference, noisy(reference, 0.1)).part == text


def test_of_several_parts_the_worst_counts() -> None:
    reference = columns(1000, 30, 30, -1.5, -1.5)
    errors = np.array([1.0, 3.0, 3.0, 0.05, 0.05])[:, None]
    assert measured(reference, noisy(reference, errors)).part == "[:, 1:3, :]"
    errors[3:] = 0.5
    assert measured(reference, noisy(reference, errors)).part == "[:, 3:, :]"


class Gives:
    def __init__(self, values: list[np.ndarray]) -> None:
        self.values = iter(values)

    def run(self, feeds: object, /) -> dict[str, np.ndarray]:
        return {"y": next(self.values)}


def test_padding_by_the_models_own_mask_counts_in_no_slice() -> None:
    reference = np.swapaxes(columns(640, 0.9), 2, 3)  # [samples, 1, positions, columns]
    value = noisy(reference, 0.05)
    value[:, :, 8:] = 99.0
    mask = np.zeros((1, 16), np.int64)
    mask[:, :8] = 1
    pair = Gives(list(reference)), Gives(list(value))
    (found,) = compare_models({"": pair}, [{"attention_mask": mask}] * len(reference))[""].results()
    assert found.part == "[:, :, 1]"
    assert found.sqnr_db == pytest.approx(measured(reference[:, :, :8], value[:, :, :8]).sqnr_db)


SKIPPED = ("cross_layer_equalization", "bias_absorption", "smoothquant")
CONFIG = load_config("trt-int8", {"effort": "fast", "skip": SKIPPED})


@pytest.mark.recent_ort
def test_scores_beside_boxes_are_seen_from_quantize_to_diff() -> None:
    """As a whole the output is fine; its scores are not, and promotion goes on until they are."""
    model, data = head(noisy=9.0), samples()
    plain = quantize(model, data, CONFIG)
    (check,) = plain.report.checks
    assert check.parts[0] == "[:, 4:, :]"
    assert check.sqnr_db[0] == pytest.approx(25, abs=1.5)
    assert check.whole_db[0] > 36
    text = shown(show, plain.report, width=200)
    assert "output0[:, 4:, :] is the part of output0 that is farthest; as a whole it has 3" in text

    found = onnxq.diff(model, plain.model, data, overrides={"engines": ("ort",), "min_sqnr": 32})
    (unmet, *_) = found.unmet
    assert (unmet.output, unmet.part) == ("output0", "[:, 4:, :]")
    assert "SQNR in dB of [:, 4:, :] is 2" in describe_unmet(found, unmet)
    assert "output0[:, 4:, :]" in shown(show, found, width=200)
    error = json.loads(write_json(found))["outputs"][0]["accuracy"][0]
    assert error["part"] == "[:, 4:, :]"
    assert error["whole_db"] > error["sqnr_db"] + 10

    better = quantize(model, data, CONFIG, min_sqnr=32)
    promotion = better.report.promotion
    assert promotion.met
    assert [step.nodes for step in promotion.steps] == [("score_map",)]
    assert min(better.report.checks[0].sqnr_db) >= 32


def test_a_wish_that_does_not_hold_names_the_part() -> None:
    found = quantize(head(noisy=9.0), samples(), CONFIG, min_sqnr=500)
    promotion = found.report.promotion
    if promotion.value == math.inf:
        pytest.skip("on this CPU everything in float gives the float model's answers bit for bit")
    assert not promotion.met
    assert promotion.part == found.report.checks[0].worst[0]
