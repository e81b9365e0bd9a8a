"""Outputs side by side: numbers wherever they stand, both interfaces, and a float model that runs once a sample."""

import gc
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.data import Dataset, load_data
from onnxq.errors import VerificationError
from onnxq.evaluation import (
    compare,
    trials,  # noqa: F401 (its sums can be packed from here on)
)
from onnxq.evaluation.compare import (
    FloatOutputs,
    MatchedRunner,
    ModelErrors,
    ReferenceRunner,
    check_interface,
    compare_models,
    count_errors,
    measure_sample,
    pair_outputs,
)
from onnxq.evaluation.selections import name_own
from onnxq.evaluation.trials import TrialModel, measure_each, measure_models
from onnxq.graph import GraphIndex
from onnxq.numerics import machine
from onnxq.progress import silent
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers, pack_value, unpack_value
from tests.evaluation.selecting import network
from tests.evaluation.selecting import samples as rows_of
from tests.graph.kit import model
from tests.passes.kit import parse


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


def product(scale: float = 1.0) -> onnx.ModelProto:
    weight = scale * np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    return parse("main (float[N, 16] x) => (float[N, 8] y) { m = MatMul(x, w) y = Relu(m) }", w=weight)


def data(proto: onnx.ModelProto, count: int = 5) -> Dataset:
    rows = np.random.default_rng(1).standard_normal((count, 16)).astype(np.float32)
    return load_data({"x": rows}, GraphIndex(proto).inputs)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Sessions, each time that one runs."""
    found: list[Session] = []
    real = Session.run
    monkeypatch.setattr(Session, "run", lambda self, *args: found.append(self) or real(self, *args))
    return found


def test_each_sample_runs_once_whatever_the_order(runs: list[Session]) -> None:
    proto = product()
    samples = data(proto)
    kept = FloatOutputs(proto, samples)
    backwards = {at: kept.run(at, samples[at])["y"] for at in reversed(range(5))}
    again = [kept.run(at, feeds)["y"] for at, feeds in enumerate(samples.samples())]
    assert len(runs) == 5
    assert all((backwards[at] == value).all() for at, value in enumerate(again))
    assert not any((again[0] == value).all() for value in again[1:])


def test_memory_does_not_grow_with_the_samples(runs: list[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    proto = product()
    samples = data(proto)
    whole = [value["y"] for value in map(Session(proto, optimize=False).run, samples.samples())]
    runs.clear()
    monkeypatch.setattr(compare, "_MOST_BYTES", 70)
    bounded = FloatOutputs(proto, samples)
    for _ in range(2):
        got = [bounded.run(at, feeds)["y"] for at, feeds in enumerate(samples.samples())]
        assert all((a == b).all() for a, b in zip(got, whole, strict=True))
    assert len(runs) == 5 + 3


def test_sums_over_samples_and_of_each() -> None:
    proto, other = product(), product(1.1)
    kept = FloatOutputs(proto, data(proto))
    ticks: list[int] = []
    runs = [Session(other, optimize=False).run]
    (whole,) = kept.sum_runs(runs, tick=lambda: ticks.append(1))[0].results()
    with silent("") as task:
        each = measure_each(TrialModel(other), kept, Crew(), task)
    assert whole.sqnr_db == pytest.approx(20.0, abs=0.01)
    assert len(each) == len(ticks) == 5
    assert all(one.worst_db() == pytest.approx(20.0, abs=0.01) for one in each)
    (few,) = kept.sum_runs(runs, limit=2)
    assert few.outputs["y"].signal == sum(one.outputs["y"].signal for one in each[:2])


@pytest.mark.parametrize(
    ("threads", "large", "most"), [(1, False, 2), (1, True, 1), (0, False, 1), (2, False, 1), (999, False, 1)]
)
def test_runs_at_a_time_share_threads(monkeypatch: pytest.MonkeyPatch, threads: int, large: bool, most: int) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(compare, "is_large_model", lambda _: large)
    proto, active, counts = product(), set(), []
    other = Session(proto, optimize=False)

    def run(feeds: Feeds) -> dict[str, Any]:
        active.add(get_ident())
        counts.append(len(active))
        time.sleep(0.05)
        active.discard(get_ident())
        return other.run(feeds)

    FloatOutputs(proto, data(proto), threads=threads).sum_runs([run])
    assert max(counts) == most


@pytest.mark.parametrize("large", [True, False])
def test_a_large_model_is_let_go_of_between_two_others(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Its session maps the weights, beside those that the next model and its calibration map."""
    proto, opened = product(), []

    class Counted(Session):
        def __init__(self, *args: object, **options: object) -> None:
            opened.append(weakref.ref(self))
            super().__init__(*args, **options)

    other = Session(product(1.1), optimize=False)
    monkeypatch.setattr(compare, "Session", Counted)
    monkeypatch.setattr(compare, "is_large_model", lambda _: large)
    floats = FloatOutputs(proto, data(proto))
    first = floats.sum_runs([other.run], limit=2)[0].results()
    gc.collect()
    assert (opened[0]() is None) == large
    assert repr(floats.sum_runs([other.run], limit=2)[0].results()) == repr(first)
    floats.sum_runs([other.run])
    # Two samples were kept, so that only the others ask for the model again.
    assert len(opened) == (2 if large else 1)


@pytest.mark.parametrize("name", ["detector", "elementwise"])
def test_the_float_model_runs_once_a_sample(name: str, runs: list[Session]) -> None:
    reference = ReferenceRunner(network(name), threads=1)
    taking = reference.selections.take_choices(network(name, 0.02))
    off, on = (MatchedRunner(reference, Session(taking, optimize=k, threads=1)) for k in (False, True))
    rows = [{"x": row[None]} for row in rows_of(4)["x"]]
    found = compare_models({"off": (reference, off), "on": (reference, on), "agree": (off, on)}, rows)
    assert len(runs) == 3 * 4
    assert runs.count(reference.session) == 4
    # Choices are compared as choices, and are no numbers of the outputs.
    assert list(found["agree"].outputs) == list(found["off"].outputs)
    assert off.agreement.results() == on.agreement.results()
    assert len(off.agreement.results()) == len(reference.selections.nodes)
    # In whichever order: the other model asks for the choices itself.
    fresh = MatchedRunner(ReferenceRunner(network(name), threads=1), Session(taking, threads=1))
    outputs = fresh.run(rows[0])
    assert not any(name_own(one.name) in outputs for one in reference.selections.nodes)
    assert np.abs(outputs["out"] - reference.run(rows[0])["out"]).max() < 0.2


def rounded() -> onnx.ModelProto:
    """The model with its weight in int8."""
    weight = numpy_helper.to_array(product().graph.initializer[0])
    text = "main (float[N, 16] x) => (float[N, 8] y) { d = DequantizeLinear(w, s, z) m = MatMul(x, d) y = Relu(m) }"
    return parse(text, w=np.rint(weight * 20).astype(np.int8), s=0.05, z=np.int8(0))


def test_pieces_find_the_same_errors_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = FloatOutputs(product(), data(product(), 11))
    models = [TrialModel(rounded()), TrialModel(rounded(), fuse_pairs=True)]

    def measure(crew: Crew) -> tuple[list[str], list[str]]:
        steps: list[int] = []
        with silent("") as task:
            monkeypatch.setattr(task, "advance", lambda count=1: steps.append(count), raising=False)
            both = measure_models(iter(models), floats, crew, task, pieces=2)
            each = measure_each(models[0], floats, crew, task)
        assert sum(steps) == 3 * 11
        return [pack_value(one)[0] for one in both], [pack_value(one)[0] for one in each]

    wanted = measure(Crew())
    assert wanted[0][0] != pack_value(ModelErrors())[0]
    assert measure(Crew(Workers(Journal(tmp_path)))) == wanted
    # Two pieces of each of two models, and eight of one.
    assert len(list(tmp_path.iterdir())) == 2 * 2 + 8
    monkeypatch.setattr(Session, "__init__", lambda *_, **__: pytest.fail("a model is opened again"))
    assert measure(Crew(Workers(Journal(tmp_path)))) == wanted
