"""Outputs side by side: numbers wherever they stand, nothing where there are none, and both interfaces."""

from contextlib import nullcontext

import numpy as np
import pytest

from onnxq.errors import VerificationError
from onnxq.evaluation import trials  # noqa: F401 (its sums can be packed from here on)
from onnxq.evaluation.compare import (
    ModelErrors,
    check_interface,
    compare_models,
    count_errors,
    measure_sample,
    pair_outputs,
)
from onnxq.workers import pack_value, unpack_value
from tests.graph.kit import model


class _Gives:
    def __init__(self, value: object) -> None:
        self.value = value

    def run(self, feeds: object, /) -> dict:
        return {"out": self.value}


@pytest.mark.parametrize(
    ("reference", "other", "db"),
    [
        ([np.ones(4), np.ones(2)], [np.ones(4), np.ones(2)], np.inf),
        ([np.ones(4), np.ones(4)], [np.ones(4), np.full(4, 1.1)], 10 * np.log10(8 / (4 * 0.01))),
        ([np.ones(4)], [np.ones(4), np.ones(4)], -np.inf),
        ([np.ones(4)], [np.ones(3)], -np.inf),
        ([{"a": 1.0, "b": 2.0}], [{"b": 2.0, "a": 1.0}], np.inf),
        ([{"a": 1.0, "b": 2.0}], [{"a": 1.0, "c": 2.0}], -np.inf),
        (np.ones(4), None, -np.inf),
    ],
)
def test_values_in_sequences_and_maps_are_compared_place_by_place(reference: object, other: object, db: float) -> None:
    (found,) = compare_models({"": (_Gives(reference), _Gives(other))}, [{}])[""].results()
    assert found.sqnr_db == pytest.approx(db)


@pytest.mark.parametrize("value", [["a", "b"], np.array(["a"]), [], None, [{"a": "b"}]])
def test_what_holds_no_numbers_gives_no_figure(value: object) -> None:
    assert compare_models({"": (_Gives(value), _Gives(value))}, [{}])[""].results() == ()


def test_a_session_of_several_pairs_runs_once_a_sample() -> None:
    runs: list[object] = []

    class Counts(_Gives):
        def run(self, feeds: object, /) -> dict:
            runs.append(self)
            return super().run(feeds)

    reference, one, two = (Counts(np.full(4, value)) for value in (1.0, 1.1, 1.01))
    found = compare_models({"a": (reference, one), "b": (reference, two)}, [{}, {}])
    assert len(runs) == 2 * 3
    assert [found[label].worst_db() for label in "ab"] == pytest.approx([20, 40])


def test_the_mean_noise_of_outputs_and_the_worst_of_them() -> None:
    errors = ModelErrors()
    reference = {"good": np.ones(4), "bad": np.ones(4), "same": np.ones(4)}
    for _ in range(2):
        errors.update({}, reference, {"good": np.full(4, 1.01), "bad": np.full(4, 1.1), "same": np.ones(4)})
    assert errors.noise() == pytest.approx((1e-4 + 1e-2) / 3)
    assert errors.worst_db() == errors.likely_db() == pytest.approx(20)
    once = ModelErrors()
    once.update({}, {"y": np.ones(4)}, {"y": np.full(4, 1.1)})
    assert once.likely_db() == pytest.approx(20 - 10 * np.log10(2))  # one sample says nothing of others
    assert ModelErrors().noise() == 0.0
    assert ModelErrors().worst_db() == np.inf


@pytest.mark.parametrize(("name", "size", "fits"), [("y", 4, True), ("z", 4, False), ("y", 5, False)])
def test_interfaces_must_be_the_same(name: str, size: int, fits: bool) -> None:
    one, other = (
        model(f"g (float[{n}] x) => (float[{n}] {out}) {{ {out} = Relu(x) }}") for out, n in (("y", 4), (name, size))
    )
    with nullcontext() if fits else pytest.raises(VerificationError):
        check_interface(one, other)


def test_outputs_that_the_other_model_lacks_and_strings_have_no_pair() -> None:
    reference = {"y": np.ones(2), "gone": np.ones(2), "words": np.array(["a"]), "flag": np.array([True])}
    found = dict(pair_outputs({}, reference, {**reference, "gone": "text", "flag": np.array([False])}))
    assert list(found) == ["y", "gone", "flag"]
    assert [one.shape for one in found["gone"][0]] == [(1,), (0,)]
    del reference["gone"]
    assert list(pair_outputs({}, {"gone": np.ones(2)}, reference)) == []


def test_places_in_nested_values_pair_up_by_key_and_position() -> None:
    reference = [{"b": np.ones(1), "a": 2.0}, (3, np.float32(4))]
    other = [{"a": 2.5, "b": np.zeros(1)}, [3, np.float32(5)]]
    ((_, pairs),) = pair_outputs({}, {"y": reference}, {"y": other})
    assert [(float(np.sum(one)), float(np.sum(two))) for one, two in pairs] == [(2.0, 2.5), (1.0, 0.0), (3, 3), (4, 5)]


def test_only_positions_that_the_mask_keeps_are_compared() -> None:
    mask = np.array([[1, 1, 0, 0]])
    one, two = np.arange(8.0).reshape(1, 4, 2), np.zeros((1, 4, 2))
    ((_, pairs),) = pair_outputs({"attention_mask": mask}, {"y": one}, {"y": two})
    assert pairs[0][0].tolist() == [[[0.0, 1.0], [2.0, 3.0]]]
    # Of other shapes nothing is left out: they differ as they are.
    ((_, pairs),) = pair_outputs({"attention_mask": mask}, {"y": one}, {"y": two[:, :3]})
    assert pairs[0][0].shape == (1, 4, 2)


def test_only_the_tokens_of_a_ring_that_a_run_wrote_are_compared() -> None:
    past, one = np.zeros((1, 2, 4, 3)), np.ones((1, 2, 4, 3))
    two = one.copy()
    two[:, :, 3:] = np.nan
    ((_, ((mine, theirs),)),) = pair_outputs({"attention_mask": np.ones((1, 3)), "past": past}, {"y": one}, {"y": two})
    np.testing.assert_array_equal(mine, theirs)


def test_samples_alone_add_up_to_the_bit() -> None:
    """Also where shapes change or differ, values are not finite, and an output is a sequence or empty."""
    rng = np.random.default_rng(0)
    shapes = [(1, 6, 3), (1, 6, 3), (1, 6, 5), (2, 6, 3), (1, 6), (0, 6, 3)]
    whole, added = ModelErrors(), ModelErrors()
    for k, shape in enumerate(shapes):
        one = {
            "fixed": rng.standard_normal((1, 4, 7)) * 10.0 ** rng.integers(-3, 3, (1, 4, 1)),
            "changing": rng.standard_normal(shape).astype(np.float32),
            "several": [rng.standard_normal(3), rng.standard_normal(k)],
            "labels": rng.integers(0, 9, 5),
            "broken": np.where(np.arange(4) == k, np.inf, 1.0),
        }
        other = {name: rng.normal(1, 0.1) * value for name, value in one.items() if name != "several"}
        other |= {"several": [value * 1.3 for value in one["several"]], "labels": one["labels"][: 4 + (k != 3)]}
        whole.update({}, one, other)
        # As a worker sends it, or a journal keeps it.
        added.add(unpack_value(*pack_value(measure_sample({}, one, other))))
    texts, arrays = zip(pack_value(whole), pack_value(added), strict=True)
    assert texts[0] == texts[1]
    assert [part.tobytes() for part in arrays[0]] == [part.tobytes() for part in arrays[1]]
    assert whole.outputs["fixed"].parts()


def test_noise_that_differs_from_sample_to_sample_makes_others_likely_worse() -> None:
    even, uneven = ModelErrors(), ModelErrors()
    for k in range(4):
        even.update({}, {"y": np.ones(100)}, {"y": np.full(100, 1.1)})
        uneven.update({}, {"y": np.ones(100)}, {"y": np.full(100, 1.2 if k == 0 else 1.0)})
    assert even.worst_db() == pytest.approx(uneven.worst_db())
    assert even.likely_db() == pytest.approx(20.0)
    # Mean noise 0.01, standard deviation 0.02, so the standard error is as large as the mean.
    assert uneven.likely_db() == pytest.approx(20.0 - 10 * np.log10(2.0))
    # Samples that are loud in both models have no spread.
    errors = ModelErrors()
    for loud in (1.0, 3.0, 0.2, 10.0):
        errors.update({}, {"y": np.full(100, loud)}, {"y": np.full(100, 1.1 * loud)})
    assert errors.estimate().sqnr_db == pytest.approx(20.0)
    assert errors.estimate().spread_db == pytest.approx(0.0, abs=1e-6)


def test_an_estimate_says_how_many_decibels_less_others_may_have() -> None:
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(200):
        errors = ModelErrors()
        for loud in rng.gamma(2.0, 0.5, 16):
            errors.update({}, {"y": np.ones(4)}, {"y": np.full(4, 1 + 0.1 * np.sqrt(loud))})
        found = errors.estimate()
        assert found.spread_db > 0
        # The mean of the noise is a hundredth of the signal's.
        kept += found.least_db <= 20.0
    assert 0.9 <= kept / 200 <= 0.98
    assert errors.estimate(0.5).least_db == pytest.approx(found.least_db - 0.5)


def test_errors_of_two_runs_merge_to_those_of_one() -> None:
    rng = np.random.default_rng(1)
    runs = [({"y": value}, {"y": value + rng.normal(0, 0.1, value.shape)}) for value in rng.normal(0, 1, (6, 3, 40))]
    whole, parts = ModelErrors(), [ModelErrors(), ModelErrors()]
    for k, (wanted, got) in enumerate(runs):
        whole.update({}, wanted, got)
        parts[k % 2].update({}, wanted, got)
    parts[0].merge(parts[1])
    assert parts[0].count == whole.count == 6
    assert parts[0].worst_db() == pytest.approx(whole.worst_db())
    assert parts[0].estimate().least_db == pytest.approx(whole.estimate().least_db)


@pytest.mark.parametrize(("samples", "errors"), [(4, 2.353), (8, 1.895), (32, 1.696), (1000, 1.646)])
def test_standard_errors_are_students(samples: int, errors: float) -> None:
    assert count_errors(samples) == pytest.approx(errors, rel=0.02)
