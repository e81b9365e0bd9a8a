"""Models tried in pieces: the same errors as in one go, and none is run again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxq.data import load_data
from onnxq.evaluation import trials
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.trials import TrialModel, measure_each, measure_models
from onnxq.graph import GraphIndex, name_nodes
from onnxq.progress import silent
from onnxq.runtime import Session
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers, pack_value

FLOAT = """<ir_version: 8, opset_import: ["": 17]> main (float[N, 4] x) => (float[N, 2] y)
<float[4, 2] w = {0.5, 1, 2, 3, 4, 5, 6, 7}> { y = MatMul(x, w) }"""
ROUNDED = """<ir_version: 8, opset_import: ["": 17]> main (float[N, 4] x) => (float[N, 2] y)
<int8[4, 2] w = {1, 1, 2, 3, 4, 5, 6, 7}, float s = {1}, int8 z = {0}>
{ d = DequantizeLinear(w, s, z) y = MatMul(x, d) }"""


def read(text: str) -> onnx.ModelProto:
    return name_nodes(parser.parse_model(text))


def test_pieces_find_the_same_errors_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"x": np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)}
    proto = read(FLOAT)
    floats = FloatOutputs(proto, load_data(rows, GraphIndex(proto).inputs))
    models = [TrialModel(read(ROUNDED), dequantize=True), TrialModel(read(ROUNDED), optimize=True)]

    def measure(crew: Crew) -> tuple[list[str], list[str]]:
        steps: list[int] = []
        with silent("") as task:
            monkeypatch.setattr(task, "advance", lambda count=1: steps.append(count), raising=False)
            both = measure_models(iter(models), floats, crew, task, pieces=2)
            each = measure_each(models[0], floats, crew, task)
        assert sum(steps) == 3 * 11
        return [pack_value(one)[0] for one in both], [pack_value(one)[0] for one in each]

    wanted = measure(Crew())
    assert wanted[0][0] != pack_value(trials.ModelErrors())[0]
    assert measure(Crew(Workers(Journal(tmp_path)))) == wanted
    # Two pieces of each of two models, and eight of one.
    assert len(list(tmp_path.iterdir())) == 2 * 2 + 8
    monkeypatch.setattr(Session, "__init__", lambda *_, **__: pytest.fail("a model is opened again"))
    assert measure(Crew(Workers(Journal(tmp_path)))) == wanted
