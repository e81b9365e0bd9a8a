"""A float model and another on its choices: each runs once a sample, whoever asks."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.evaluation.compare import compare_models
from onnxq.evaluation.float_outputs import MatchedRunner, ReferenceRunner
from onnxq.evaluation.selections import name_own
from onnxq.runtime import Session
from tests.evaluation.selecting import network, samples


@pytest.mark.parametrize("name", ["detector", "elementwise"])
def test_the_float_model_runs_once_a_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Session] = []
    real = Session.run
    monkeypatch.setattr(Session, "run", lambda self, *args: runs.append(self) or real(self, *args))
    reference = ReferenceRunner(network(name), threads=1)
    taking = reference.selections.take_choices(network(name, 0.02))
    off, on = (MatchedRunner(reference, Session(taking, optimize=k, threads=1)) for k in (False, True))
    rows = [{"x": row[None]} for row in samples(4)["x"]]
    found = compare_models({"off": (reference, off), "on": (reference, on), "agree": (off, on)}, rows)
    assert len(runs) == 3 * 4
    assert runs.count(reference.session) == 4
    # Choices are compared as choices, and are no numbers of the outputs.
    assert [one.name for one in found["agree"]] == [one.name for one in found["off"]]
    assert off.agreement.results() == on.agreement.results()
    assert len(off.agreement.results()) == len(reference.selections.nodes)
    # In whichever order: the other model asks for the choices itself.
    fresh = MatchedRunner(ReferenceRunner(network(name), threads=1), Session(taking, threads=1))
    outputs = fresh.run(rows[0])
    assert not any(name_own(one.name) in outputs for one in reference.selections.nodes)
    assert np.abs(outputs["out"] - reference.run(rows[0])["out"]).max() < 0.2
