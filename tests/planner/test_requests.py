"""The plan says as a person asked in rules: first match wins, a typo is an error."""

import pytest

import onnxq
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.plan import Plan
from onnxq.sites import TensorId
from tests.pipeline.models import images, residual
from tests.planner.kit import FORCE


def planned(*rules: dict[str, object]) -> Plan:
    return onnxq.make_plan(residual(), images(), Config.model_validate({"rules": (*rules, FORCE)}))


NARROW = {"bits": 4, "quantize": True}


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ((), {"x": 8, "w1": 8, "b1": 32}),
        (({"tensor": "w1", "set": NARROW},), {"w0": 8, "w1": 4}),
        (({"tensor": "/^w[12]$/", "role": "weight", "set": NARROW},), {"w0": 8, "w1": 4, "w2": 4}),
        # The first that matches wins.
        (
            ({"tensor": "w1", "set": NARROW}, {"op": "Conv", "role": "weight", "set": {"bits": 6, "quantize": True}}),
            {"w0": 6, "w1": 4},
        ),
        # r -> s holds both branches and the Add; the stem in front and the Gemm behind are outside.
        (({"between": ("r", "s"), "role": "weight", "set": NARROW},), {"w0": 8, "w1": 4, "w2": 4, "w3": 8}),
        # A float weight leaves its node float.
        (({"tensor": "w3", "role": "weight", "set": {"float": True}},), {"w2": 8, "w3": None, "b3": None}),
    ],
    ids=["none", "a tensor", "a regex and a role", "two of one weight", "between", "a float weight"],
)
def test_rules_choose_bits(rules: tuple[dict[str, object], ...], found: dict[str, int | None]) -> None:
    bits = {str(site.site): site.spec.bits for site in planned(*rules).sites}
    assert {name: bits.get(name) for name in found} == found


def test_float_by_operator_says_so_in_the_plan() -> None:
    plan = planned({"op": "Gemm", "set": {"float": True}})
    assert "w3" not in {str(site.site) for site in plan.sites}
    refusal = next(refusal for refusal in plan.left_float if refusal.rule == "configuration")
    assert "op=Gemm" in refusal.reason


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
        ({"between": ("y", "x"), "set": {"float": True}}, "no path"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rule: dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        planned(rule)


def test_a_rule_for_a_node_that_preparation_folded_is_no_typo() -> None:
    """Rules speak of the model the person has, not of what is left after folding."""
    proto = residual()
    proto.graph.node[1].name = "my_relu"
    onnxq.make_plan(proto, images(), Config.model_validate({"rules": [{"node": "my_relu", "set": {"float": True}}]}))
