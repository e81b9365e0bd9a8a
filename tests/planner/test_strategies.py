"""Candidates of a measured placement: all of them different, those of TensorRT by its rules."""

from __future__ import annotations

import pytest

from onnxq.config import load_config
from onnxq.graph import name_nodes
from onnxq.plan import PlacementChoice
from onnxq.planner import Choice, state_placement
from tests.engines import kit
from tests.pipeline.models import residual


@pytest.mark.parametrize("target", ["ort", "trt"])
def test_candidates_differ_and_hold_the_rules_and_nothing(target: str) -> None:
    problem = state_placement(name_nodes(residual()), load_config(f"{target}-int8"))
    found = problem.candidates()
    assert found["none"] == frozenset()
    assert len(set(found.values())) == len(found)
    assert found["rules"]
    assert any(0 < len(chosen) < len(found["rules"]) for chosen in found.values())


def test_tensorrts_may_have_attention_and_keep_what_was_asked_for() -> None:
    body = """(float[1,4,16,32] q, float[1,4,32,16] k, float[1,4,16,32] v) => (float[1,4,16,32] o) {
        t = MatMul(q, k) p = Softmax <axis=-1>(t) o = MatMul(p, v) }"""
    found = state_placement(kit.graph(body), load_config("trt-int8", {"attention": "auto"})).candidates()
    assert {"t/MatMul", "o/MatMul"} <= found["attention"]
    assert not found["rules"]
    forced = {"rules": [{"op": "Conv", "set": {"quantize": True}}]}
    problem = state_placement(name_nodes(residual()), load_config("trt-int8", forced))
    convolutions = {unit.name for unit in problem.units.units if unit.node.op_type == "Conv"}
    assert all(convolutions <= chosen for name, chosen in problem.candidates().items() if name != "none")
    plan = problem.placed(Choice(problem.candidates()["rules"]), PlacementChoice())
    assert plan.sites
