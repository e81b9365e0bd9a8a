"""The plan says as a person asked in rules: first match wins, a typo is an error."""

import numpy as np
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.plan import Plan
from onnxq.sites import TensorId
from tests.codes.kit import model
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


# Convolutions of ONNX Runtime write integers, those of TensorRT float.
@pytest.mark.parametrize(
    ("target", "rule", "outputs", "code"),
    [
        ("ort", {"role": "output", "set": {"bits": 4}}, {"a": 8, "y": 4}, "W104"),
        ("ort", {"tensor": "y", "set": {"float": True}}, {"a": 8}, ""),
        ("ort", {"tensor": "a", "set": {"float": True}}, {}, ""),
        ("trt", {"role": "output", "set": {"bits": 4}}, {"a": 8}, "W149"),
        ("trt", {"op": "*", "role": "activation", "set": {"bits": 8}}, {"a": 8}, ""),
    ],
)
def test_rules_reach_what_operators_write(
    target: str, rule: dict[str, object], outputs: dict[str, int], code: str
) -> None:
    """No pair stands where a rule wants float, and a rule that changes nothing is told."""
    net = model(
        "g (float[1,8,8,8] x) => (float[1,8,8,8] y) { a = Conv<pads=[1,1,1,1]>(x, w) y = Conv<pads=[1,1,1,1]>(a, w) }",
        w=np.ones((8, 8, 3, 3), np.float32),
    )
    config = load_config(f"{target}-int8", {"effort": "fast", "rules": [rule, FORCE]})
    plan = onnxq.make_plan(net, None, config)
    bits = {str(site.site): site.spec.bits for site in plan.sites if site.role.is_measured}
    assert {name: bits[name] for name in ("a", "y") if name in bits} == outputs
    assert {warning.code for warning in plan.warnings} - {"W101"} == ({code} if code else set())


def test_no_rule_is_for_biases_alone() -> None:
    with pytest.raises(ConfigError, match=r"key `bias`") as caught:
        load_config(None, {"rules": [{"role": "bias", "set": {"float": True}}]})
    assert caught.value.code == "Q304"


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
