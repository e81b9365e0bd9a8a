"""From a model and a configuration to a plan: what is told about scopes, opsets, anchors and nodes to guard."""

from dataclasses import replace

import onnx
import pytest

from onnxq.backends import find_target, load_config
from onnxq.errors import ConfigError
from onnxq.graph import compute_fingerprint, compute_structural_ids, get_index
from onnxq.plan import PlacementChoice
from onnxq.planner import anchor_sites, find_float_nodes, state_placement
from onnxq.planner.choose import Choice
from onnxq.sites import LeftFloat, Refusal, Role, TensorId
from tests.planner.kit import FORCE, MAP, POINT, draft, network, table

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
    assert plan.refusals == (Refusal("a", "ORT has no quantized ConvTranspose kernel", "", "no-kernel", "R101"),)
    assert [one.subject for one in plan.left_float] == ["y"]
    assert draft(network(text, w=(8, 8, 2, 2)), preset="virtual-int8").default().refusals == ()


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
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w, b) y = Conv(a, w) }}"
    proto = network(text, w=POINT, b=(8,))
    index, ids = get_index(proto), compute_structural_ids(proto)
    problem = draft(proto, FORCE)
    plan = problem.default()
    node = {name: ids[TensorId(name)] for name in ("x", "a", "y")}
    assert {str(site.site): site.anchor for site in plan.sites} == {
        "x": node["x"], "w": f"{node['a']}/1", "b": f"{node['a']}/2", "a": node["a"], "y": node["y"],
    }  # fmt: skip
    assert plan.nodes == {"a": node["a"], "y": node["y"]}
    bare = [replace(site, anchor="") for site in plan.sites]
    sites, nodes = anchor_sites(index, bare, ["y"], ids)
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


def test_a_rule_may_name_what_preparation_took_away() -> None:
    before = network(f"g ({MAP} x) => ({MAP} y) {{ gone = Relu(x) y = Conv(gone, w) }}", w=POINT)
    after = network(f"g ({MAP} x) => ({MAP} y) {{ y = Conv(x, w) }}", w=POINT)
    config = load_config("ort-int8", {"rules": [{"node": "gone", "set": {"float": True}}]})
    assert state_placement(after, config, before=get_index(before)).default().sites == ()
    with pytest.raises(ConfigError, match="matches nothing in this model") as caught:
        state_placement(after, config)
    assert caught.value.code == "Q309"


def test_the_same_model_gives_the_same_plan() -> None:
    proto = network(LOOP, w=POINT)
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    assert draft(proto, FORCE).default() == draft(copy, FORCE).default()
