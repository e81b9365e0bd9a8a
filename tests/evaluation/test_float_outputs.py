"""The float model runs once a sample, in whichever order the samples are asked for."""

import gc
import time
import weakref
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.data import Dataset, load_data
from onnxq.evaluation import compare
from onnxq.evaluation.compare import FloatOutputs, MatchedRunner, ModelErrors, ReferenceRunner, compare_models
from onnxq.evaluation.selections import name_own
from onnxq.evaluation.trials import TrialModel, measure_each, measure_models
from onnxq.graph import GraphIndex
from onnxq.numerics import machine
from onnxq.progress import silent
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers, pack_value
from tests.evaluation.selecting import network
from tests.evaluation.selecting import samples as rows_of
from tests.passes.kit import parse


def model(scale: float = 1.0) -> onnx.ModelProto:
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
    proto = model()
    samples = data(proto)
    kept = FloatOutputs(proto, samples)
    backwards = {at: kept.run(at, samples[at])["y"] for at in reversed(range(5))}
    again = [kept.run(at, feeds)["y"] for at, feeds in enumerate(samples.samples())]
    assert len(runs) == 5
    assert all((backwards[at] == value).all() for at, value in enumerate(again))
    assert not any((again[0] == value).all() for value in again[1:])


def test_memory_does_not_grow_with_the_samples(runs: list[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model()
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
    proto, other = model(), model(1.1)
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
def test_runs_at_a_time_leave_each_session_its_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, large: bool, most: int
) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(compare, "is_large_model", lambda _: large)
    proto, active, counts = model(), set(), []
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
    proto, opened = model(), []

    class Counted(Session):
        def __init__(self, *args: object, **options: object) -> None:
            opened.append(weakref.ref(self))
            super().__init__(*args, **options)

    other = Session(model(1.1), optimize=False)
    monkeypatch.setattr(compare, "Session", Counted)
    monkeypatch.setattr(compare, "is_large_model", lambda _: large)
    floats = FloatOutputs(proto, data(proto))
    first = floats.sum_runs([other.run], limit=2)[0].results()
    gc.collect()
    assert (opened[0]() is None) == large
    assert floats.sum_runs([other.run], limit=2)[0].results() == first
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
    weight = numpy_helper.to_array(model().graph.initializer[0])
    text = "main (float[N, 16] x) => (float[N, 8] y) { d = DequantizeLinear(w, s, z) m = MatMul(x, d) y = Relu(m) }"
    return parse(text, w=np.rint(weight * 20).astype(np.int8), s=0.05, z=np.int8(0))


def test_pieces_find_the_same_errors_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = FloatOutputs(model(), data(model(), 11))
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
