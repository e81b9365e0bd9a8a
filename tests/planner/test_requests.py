"""The plan says as a person asked in rules: first match wins, a typo is an error."""

from dataclasses import replace

import numpy as np
import pytest

import onnxq
from onnxq.backends import find_target, load_config
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.graph import compute_fingerprint, compute_structural_ids, get_index
from onnxq.plan import PlacementChoice, Plan
from onnxq.planner import anchor_sites, find_float_nodes, state_placement
from onnxq.planner.choose import Choice
from onnxq.sites import LeftFloat, Refusal, Role, TensorId
from tests.codes.kit import model
from tests.pipeline.models import images, residual
from tests.planner.kit import FORCE, MAP, POINT, draft, network, table


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
def test_rules_reach_what_ops_write(target: str, rule: dict[str, object], outputs: dict[str, int], code: str) -> None:
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
    with pytest.raises(ConfigError, match=r"key `bias`.*\[Q304\]"):
        load_config(None, {"rules": [{"role": "bias", "set": {"float": True}}]})


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
    with pytest.raises(ConfigError, match=nearest) as caught:
        planned(rule)
    assert caught.value.code == ("Q314" if "between" in rule else "Q309")


def test_a_rule_for_a_node_that_preparation_folded_is_no_typo() -> None:
    """Rules speak of the model the person has, not of what is left after folding."""
    proto = residual()
    proto.graph.node[1].name = "my_relu"
    onnxq.make_plan(proto, images(), Config.model_validate({"rules": [{"node": "my_relu", "set": {"float": True}}]}))


# ---- From a model and a configuration to a plan: what is told about scopes, opsets, anchors and nodes to guard.

LOOP = f"""g ({MAP} x, int64 n, bool k) => ({MAP} y) {{
    a = Conv(x, w) y = Loop (n, k, a) <
        body = b (int64 i, bool go, {MAP} v) => (bool on, {MAP} o) {{
            on = Identity(go) h = Conv(v, w) o = Relu(h)
        }}>
}}"""


def test_a_closed_scope_stays_float_with_everything_in_it() -> None:
    proto = network(LOOP, w=POINT)
    config = load_config("ort-int8", {"rules": [FORCE]})
    refusal = Refusal("y.body", "no sample", "give samples that reach it", "scope", "R104")
    open_, closed = (state_placement(proto, config, closed=given).default() for given in ({}, {"y.body": refusal}))
    assert "y.body::h/in1" in table(open_)
    assert set(table(closed)) == {"x", "w", "a"}
    assert closed.refusals == (refusal,)
    # Inside it the engine could quantize by itself.
    assert closed.float_nodes == ("h",)
    # Scopes are closed by their whole names.
    for scope in ("y.bod", "y"):
        assert "h" in state_placement(proto, config, closed={scope: Refusal(scope, "why")}).ops.by_name


def test_operators_without_a_kernel_are_told_whatever_else_is_chosen() -> None:
    text = f"""g ({MAP} x) => (float[1,8,12,12] y) {{
        a = ConvTranspose<strides=[2,2]>(x, w) b = Relu(a) y = AveragePool<kernel_shape=[1,1]>(b)
    }}"""
    plan = draft(network(text, w=(8, 8, 2, 2))).default()
    reason = "ORT has no quantized ConvTranspose kernel; `mode: weight-only` makes the file smaller, and no faster"
    assert plan.refusals == (Refusal("a", reason, "", "no-kernel", "R101"),)
    assert [one.subject for one in plan.left_float] == ["y"]
    assert draft(network(text, w=(8, 8, 2, 2)), preset="virtual-int8").default().refusals == ()
    # In the file alone its weight is in integers, with a scale for each output channel.
    (stored,) = draft(network(text, w=(8, 8, 2, 2)), preset="ort-int8-weights").default().sites
    assert ([edge.node for edge in stored.named_consumers], stored.spec.granularity.axis) == (["a"], 1)


def test_the_plan_carries_the_fingerprint_unless_nobody_keeps_it() -> None:
    proto, config = network(LOOP, w=POINT), load_config("ort-int8")
    print_of = compute_fingerprint(proto)
    kept = state_placement(proto, config, name="m.onnx", prepare=("dead",)).base
    assert (kept.topology, kept.weights) == (print_of.topology, print_of.weights)
    assert (kept.model, kept.prepare, kept.target) == ("m.onnx", ("dead",), "ort")
    loose = state_placement(proto, config, identified=False).base
    assert (loose.topology, loose.weights) == ("", "")


@pytest.mark.parametrize(("preset", "told"), [("ort-int8", 1), ("trt-int8", 0), ("virtual-int8", 0)])
def test_sums_that_may_overflow_are_told_where_kernels_add_in_16_bits(preset: str, told: int) -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) {{ y = Conv(x, w) }}", w=POINT)
    plan = draft(proto, preset=preset, saturation="allow").default()
    assert [line.code for line in plan.warnings] == ["W102"] * told
    assert draft(proto, preset=preset).default().warnings == ()


@pytest.mark.parametrize(
    ("op", "guarded"),
    [
        ("Conv(x, w)", True),
        ("ConvTranspose(x, w)", True),
        ("AveragePool<kernel_shape=[1,1]>(x)", True),
        ("Softmax(x)", True),
        ("Relu(x)", False),
        ("MaxPool<kernel_shape=[1,1]>(x)", False),
    ],
)
def test_nodes_that_onnxruntime_would_quantize_by_itself(op: str, guarded: bool) -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) {{ y = {op} }}", w=POINT)
    assert find_float_nodes(get_index(proto), (), find_target("ort")) == (("y",) if guarded else ())
    quantized = draft(proto, FORCE).default().sites
    floats = find_float_nodes(get_index(proto), quantized, find_target("ort"))
    assert floats == (("y",) if guarded and op != "Conv(x, w)" else ())
    # TensorRT does nothing by itself.
    assert draft(proto, preset="trt-int8").default().float_nodes == ()


def test_anchors_are_structural_ids_of_tensors_and_of_reading_inputs() -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w, b) y = Conv(a, w) }}", w=POINT, b=(8,))
    index, ids = get_index(proto), compute_structural_ids(proto)
    plan = draft(proto, FORCE).default()
    node = {name: ids[TensorId(name)] for name in ("x", "a", "y")}
    assert {str(site.site): site.anchor for site in plan.sites} == {
        "x": node["x"], "w": f"{node['a']}/1", "b": f"{node['a']}/2", "a": node["a"], "y": node["y"],
    }  # fmt: skip
    assert plan.nodes == {"a": node["a"], "y": node["y"]}
    sites, nodes = anchor_sites(index, [replace(site, anchor="") for site in plan.sites], ["y"], ids)
    assert (sites, nodes) == (plan.sites, plan.nodes)


def test_any_choice_of_operators_becomes_a_plan() -> None:
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) b = Conv(a, w) y = Conv(b, w) }}"
    problem = draft(network(text, w=POINT))
    why = (LeftFloat("a", "because", "test"), LeftFloat("a", "again", "test"))
    plan = problem.placed(Choice(frozenset({"b"}), why), PlacementChoice(candidate="mine"))
    assert table(plan) == {"a": "activation: b/in0", "w": "weight: b/in1", "b": "activation: *"}
    assert plan.float_nodes == ("a", "y")
    assert plan.left_float == why[:1]
    assert plan.placement == PlacementChoice(candidate="mine")
    assert {site.sum_orders for site in plan.sites if site.role is Role.WEIGHT} == {((0, 2, 3, 1),)}
