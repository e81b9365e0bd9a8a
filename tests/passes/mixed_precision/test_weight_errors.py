"""Errors of each weight alone, against quantizing it by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.config import Config, Rule
from onnxq.graph import GraphIndex, name_nodes
from onnxq.numerics import fake_quant
from onnxq.passes.mixed_precision.weight_errors import measure_isolated
from onnxq.progress import silent
from onnxq.runtime import Session
from onnxq.runtime.crew import Crew
from onnxq.sites import Role
from onnxq.workers import Journal, Workers
from tests.evaluation.selecting import network
from tests.evaluation.selecting import samples as tokens
from tests.pipeline.models import images, residual

EVERYTHING = Rule(op="*", set={"quantize": True})  # type: ignore[arg-type]


def config(**raw: object) -> Config:
    return Config.model_validate({"weights": {"bits": 4, "granularity": "channel"}, "rules": (EVERYTHING,), **raw})


def test_measured_errors_are_those_of_each_weight_alone(tmp_path: Path) -> None:
    proto = residual()
    result = onnxq.quantize(proto, images(), config(effort="fast"), overrides={"latency": False})
    samples = [{"x": images()["x"][k : k + 1]} for k in range(4)]
    found = measure_isolated(name_nodes(proto), result.plan, samples, samples, rounded=False, progress=silent)
    for _ in range(2):
        # In pieces, and taken from them.
        crew = Crew(Workers(Journal(tmp_path)))
        given = (name_nodes(proto), result.plan, samples, samples)
        assert measure_isolated(*given, rounded=False, progress=silent, crew=crew) == found
        assert len(list(tmp_path.iterdir())) == len(found)
    weights = [site for site in result.plan.sites if site.role is Role.WEIGHT]
    assert set(found) == {site.site for site in weights}
    index = GraphIndex(name_nodes(proto))
    plain = Session(proto, optimize=False)
    for site in weights:
        edge = site.consumers[0]
        node = index.node(edge.node)
        name = node.inputs[edge.index]
        changed = name_nodes(proto)
        tensor = next(t for t in changed.graph.initializer if t.name == name)
        value = numpy_helper.to_array(tensor)
        tensor.raw_data = fake_quant(value, site.qparams, site.spec).astype(np.float32).tobytes()
        other = Session(changed, optimize=False)
        error = power = 0.0
        for sample in samples:
            one, two = plain.run(sample)["y"].astype(np.float64), other.run(sample)["y"].astype(np.float64)
            error, power = error + float(((one - two) ** 2).sum()), power + float((one**2).sum())
        assert found[site.site] == pytest.approx(error / power, rel=1e-3)


def test_rows_that_change_places_are_no_error_of_a_weight(tmp_path: Path) -> None:
    """The scores of two boxes are as close as rounding: which comes first hangs on the weights of all layers."""
    proto, rows = network("detector"), dict(tokens(6))
    result = onnxq.quantize(proto, rows, config(weights={"bits": 6}, effort="fast"), overrides={"latency": False})
    samples = [{"x": row[None]} for row in rows["x"]]
    found = measure_isolated(proto, result.plan, samples, samples, rounded=False, progress=silent)
    assert {site.name for site in found} == {"w_body", "w_box", "w_score"}
    assert all(0 < error < 0.02 for error in found.values())
    crew = Crew(Workers(Journal(tmp_path)))
    assert measure_isolated(proto, result.plan, samples, samples, rounded=False, progress=silent, crew=crew) == found
