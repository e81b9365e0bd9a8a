"""The plan says as a person asked in rules: first match wins, a typo is an error."""

from __future__ import annotations

import pytest

import onnxq
from onnxq.config import Config, Rule
from onnxq.errors import ConfigError
from onnxq.plan import Plan
from onnxq.sites import TensorId
from tests.pipeline.models import images, residual


def planned(*rules: dict[str, object], **config: object) -> Plan:
    made = tuple(Rule.model_validate(rule) for rule in rules)
    force = Rule(op="*", set={"quantize": True})  # type: ignore[arg-type]
    return onnxq.make_plan(residual(), images(), Config.model_validate({**config, "rules": (*made, force)}))


def bits(plan: Plan) -> dict[str, int]:
    return {str(site.site): site.spec.bits for site in plan.sites}


def test_defaults_hold_without_rules() -> None:
    found = bits(planned())
    assert found["x"] == 8
    assert found["w1"] == 8
    assert found["b1"] == 32


def test_by_tensor_name() -> None:
    found = bits(planned({"tensor": "w1", "set": {"bits": 4, "quantize": True}}))
    assert found["w1"] == 4
    assert found["w0"] == 8


def test_by_regex_and_role() -> None:
    found = bits(planned({"tensor": "/^w[12]$/", "role": "weight", "set": {"bits": 6, "quantize": True}}))
    assert (found["w0"], found["w1"], found["w2"]) == (8, 6, 6)


def test_first_match_wins() -> None:
    first = {"tensor": "w1", "set": {"bits": 4, "quantize": True}}
    second = {"op": "Conv", "role": "weight", "set": {"bits": 6, "quantize": True}}
    found = bits(planned(first, second))
    assert (found["w0"], found["w1"]) == (6, 4)


def test_float_by_operator_says_so_in_the_plan() -> None:
    plan = planned({"op": "Gemm", "set": {"float": True}})
    assert "w3" not in bits(plan)
    refusal = next(r for r in plan.left_float if r.rule == "configuration")
    assert "op=Gemm" in refusal.reason


def test_a_float_weight_leaves_its_node_float() -> None:
    plan = planned({"tensor": "w3", "role": "weight", "set": {"float": True}})
    assert not {"w3", "b3"} & set(bits(plan))


def test_between_two_tensors() -> None:
    """r -> s holds both branches and the Add; the stem in front and the Gemm behind are outside."""
    plan = planned({"between": ("r", "s"), "role": "weight", "set": {"bits": 4, "quantize": True}})
    found = bits(plan)
    assert found["w1"] == found["w2"] == 4
    assert found["w3"] == 8


def test_observer_of_one_site() -> None:
    plan = planned({"tensor": "x", "set": {"observer": "percentile", "quantize": True}})
    assert plan.site(TensorId("x")).observer.name == "percentile"
    assert plan.site(TensorId("r")).observer.name == "minmax"


@pytest.mark.parametrize(
    ("rule", "nearest"),
    [
        ({"tensor": "w11", "set": {"bits": 4}}, "w1"),
        ({"op": "Convv", "set": {"float": True}}, "Conv"),
        ({"node": "/nothing/", "set": {"float": True}}, "node"),
        ({"between": ("rr", "s"), "set": {"float": True}}, "r"),
        ({"op": "Conv", "tensor": "w3", "set": {"float": True}}, "never on one node"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rule: dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        planned(rule)


def test_between_without_a_path() -> None:
    with pytest.raises(ConfigError, match="no path"):
        planned({"between": ("y", "x"), "set": {"float": True}})


def test_a_rule_for_a_node_that_preparation_folded_is_no_typo() -> None:
    """Rules speak of the model the person has, not of what is left after folding."""
    proto = residual()
    proto.graph.node[1].name = "my_relu"
    rules = (Rule.model_validate({"node": "my_relu", "set": {"float": True}}),)
    onnxq.make_plan(proto, images(), Config(rules=rules))
