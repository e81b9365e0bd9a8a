"""A plan is carried out on a float file whose weights were turned, merged and renamed, and whose nodes were fused."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import onnxq
from onnxq.calibrate.contents import note_contents
from onnxq.errors import PlanError
from onnxq.graph import compute_fingerprint, get_index
from onnxq.graph.scopes import walk_graphs
from onnxq.numerics import quantize_weight
from onnxq.plan import BiasPlan, Plan, Scaling, from_json, to_json
from onnxq.planner import digest_weights, fit_plan
from onnxq.runtime import Session
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerChannel
from tests.networks import add_arrays
from tests.planner.kit import FORCE, MAP, POINT, draft, network, site

HEAD = "g (float[4,16] x) => (float[2,2,16] y)"
TEXT = f"""{HEAD} <int64[3] up = {{2, 2, 16}}> {{
    a = MatMul(x, w) b = Add(a, c) r = Relu(b) t = Reshape(r, up) m = MatMul(t, v) y = Add(m, c)
}}"""
# As tools write it: a Gemm that reads its weight turned, other names, one constant for two, the Reshape elsewhere.
GEMM = f"""{HEAD} <int64[3] up = {{2, 2, 16}}> {{
    t1 = Gemm <transB = 1> (x, c0, c1) t2 = Relu(t1) t3 = Gemm <transB = 1> (t2, c0, c1) y = Reshape(t3, up)
}}"""
FLAT = f"""{HEAD} <int64[3] up = {{2, 2, 16}}> {{
    a = MatMul(x, w) b = Add(a, c) r = Relu(b) m = MatMul(r, v) n = Add(m, c) y = Reshape(n, up)
}}"""


def weight() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)


def make(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    proto = network(text)
    add_arrays(proto.graph, **weights)
    return proto


def make_float(text: str = TEXT, w: np.ndarray | None = None) -> onnx.ModelProto:
    bias = np.linspace(-1, 1, 16, dtype=np.float32)
    return make(text, w=weight() if w is None else w, v=weight() if w is None else w, c=bias)


@lru_cache(maxsize=1)
def quantize() -> onnxq.Result:
    config = {"rules": [FORCE], "weights": {"granularity": "channel"}}
    batches = [{"x": np.random.default_rng(k).standard_normal((4, 16)).astype(np.float32)} for k in range(4)]
    return onnxq.quantize(make_float(), batches, "ort-int8", overrides={**config, "latency": False, "effort": "fast"})


def run(model: onnx.ModelProto) -> np.ndarray:
    x = np.random.default_rng(9).standard_normal((4, 16)).astype(np.float32)
    return Session(model, optimize=False).run({"x": x})["y"]


def test_turned_merged_and_renamed() -> None:
    first = quantize()
    gemm = make(GEMM, c0=weight().T.copy(), c1=np.linspace(-1, 1, 16, dtype=np.float32))
    again = onnxq.apply(gemm, from_json(to_json(first.plan)))
    np.testing.assert_allclose(run(again.model), run(first.model), rtol=1e-5, atol=1e-6)
    assert again.plan.site(TensorId("c0")).spec.granularity == PerChannel(0)
    assert len([site for site in again.plan.sites if site.role == "weight"]) == 2
    # The plan of the result is of the rewritten file.
    assert onnxq.apply(gemm, again.plan).model == again.model


def test_nodes_that_only_moved_values_are_gone() -> None:
    first, again = quantize(), onnxq.apply(make_float(FLAT), quantize().plan)
    np.testing.assert_allclose(run(again.model), run(first.model), rtol=1e-5, atol=1e-6)
    # The pair stood behind the Reshape.
    names = [{str(site.site) for site in done.plan.sites} for done in (first, again)]
    assert names == [{"x", "w", "t", "v"}, {"x", "w", "r", "v"}]


def test_sizes_that_the_plan_was_not_made_for_change_nothing_while_names_and_weights_agree() -> None:
    """As prefill and decode, exported one after the other; constants are numbered anew."""
    longer = TEXT.replace("[4,16] x", "[6,16] x").replace("2,2,16", "3,2,16").replace("2, 2, 16", "3, 2, 16")
    first, plan, bias = quantize(), from_json(to_json(quantize().plan)), np.linspace(-1, 1, 16, dtype=np.float32)
    again = onnxq.apply(make(longer.replace("(t, v)", "(t, v2)"), w=weight(), v2=weight(), c=bias), plan)
    scales = [[np.asarray(site.qparams.scale).tolist() for site in done.plan.sites] for done in (first, again)]
    assert scales[0] == scales[1]
    assert [str(site.site) for site in again.plan.sites] == ["x", "w", "t", "v2"]
    with pytest.raises(PlanError, match="reads what is made otherwise"):
        onnxq.apply(make(longer, w=weight(), v=weight() + 0.1, c=bias), plan)


def test_what_is_not_there_is_named_with_what_is_near() -> None:
    trained = weight()
    trained[0, 0] += 0.5
    with pytest.raises(PlanError, match=r"w: is in the plan but not in this model.*\[Q404\]") as caught:
        onnxq.apply(make_float(FLAT, trained), quantize().plan)
    assert "'w' (off by 0.0043 of its size)" in caught.value.fix
    assert "new_weights=True" in caught.value.fix
    assert "plan this model again, or leave out the rewrite" in caught.value.fix


# s has the values of r; its only reader only moves values, and tools leave that out.
TWINS = """g (float[4,16] x) => (float[4,16] y, float[2,2,16] z) <int64[3] up = {2, 2, 16}> {
    a = MatMul(x, w) r = Relu(a) y = MatMul(r, v) s = Relu(a) t = Reshape(s, up) z = Softmax(t) }"""
LATER = TWINS.replace("t = Reshape(s, up) z = Softmax(t)", "t = Softmax(s) z = Reshape(t, up)")


def test_a_twin_that_no_reader_of_the_site_reads_gets_no_pair() -> None:
    given = [make(text, w=weight(), v=weight()) for text in (TWINS, LATER)]
    batch = {"x": np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)}
    config = {"rules": [FORCE], "latency": False, "effort": "fast"}
    plan = onnxq.quantize(given[0], [batch], "ort-int8", overrides=config).plan
    # As the torch front end writes sites: for all readers, whoever they are.
    twin = replace(plan.site(TensorId("r")), site=TensorId("s"), tensor=TensorId("s"), consumers=None, anchor="")
    plan = note_contents(replace(plan, sites=(*plan.sites, twin)), given[0])
    again = onnxq.apply(given[1], plan)
    assert [str(site.site) for site in again.plan.sites] == ["x", "w", "r", "v", "s"]
    readers = {name: node.op_type for node in again.model.graph.node for name in node.input}
    assert (readers["r/dequantized"], readers["s/dequantized"]) == ("MatMul", "Softmax")


THREE = """g (float[2,4,16] x) => (float[2,4,24] k, float[2,4,16] q, float[2,4,16] z) {
    a = MatMul(x, wq) q = Add(a, bq) b = MatMul(x, wk) k = Add(b, bk) c = MatMul(x, wv) v = Add(c, bv)
    r = Relu(v) z = MatMul(r, wo) }"""
# As onnxsim writes it, in an order of its own.
ONE = """g (float[2,4,16] x) => (float[2,4,24] k, float[2,4,16] q, float[2,4,16] z) <int64[3] parts = {16, 16, 24}> {
    a = MatMul(x, w) b = Add(a, bias) v, q, k = Split<axis = 2>(b, parts) r = Relu(v) z = MatMul(r, wo)
}"""


@lru_cache(maxsize=1)
def list_parts() -> dict[str, np.ndarray]:
    """Weights and biases of THREE."""
    shapes = {"wq": (16, 16), "wk": (16, 24), "wv": (16, 16), "wo": (16, 16), "bq": (16,), "bk": (24,), "bv": (16,)}
    random = np.random.default_rng(5)
    return {
        name: (random.standard_normal(shape) * (1 + k)).astype(np.float32)
        for k, (name, shape) in enumerate(shapes.items())
    }


def join_parts() -> onnx.ModelProto:
    parts = list_parts()
    w, bias = (np.concatenate([parts[f"{kind}{name}"] for name in "vqk"], -1) for kind in "wb")
    return make(ONE, w=w, bias=bias, wo=parts["wo"])


def quantize_parts(**weights: object) -> onnxq.Result:
    config = {"rules": [FORCE], "weights": weights, "latency": False, "effort": "fast"}
    batches = [{"x": np.random.default_rng(k).standard_normal((2, 4, 16)).astype(np.float32)} for k in range(4)]
    return onnxq.quantize(make(THREE, **list_parts()), batches, "ort-int8", overrides=config)


@pytest.mark.parametrize(("granularity", "chosen"), [("channel", False), ("tensor", False), ("channel", True)])
def test_weights_that_a_tool_put_side_by_side(granularity: str, chosen: bool) -> None:
    first = quantize_parts(granularity=granularity)
    if chosen:
        # Integers that some rounding chose, for one of the weights.
        site = first.plan.site(TensorId("wk"))
        values = np.clip(quantize_weight(list_parts()["wk"], site.qparams, site.spec) + 1, -127, 127).astype(np.int8)
        sites = [replace(one, values=values) if one is site else one for one in first.plan.sites]
        first = onnxq.apply(make(THREE, **list_parts()), replace(first.plan, sites=tuple(sites)))
        assert first.plan.site(TensorId("wk")).values is not None
    again = onnxq.apply(join_parts(), from_json(to_json(first.plan)))
    found = again.plan.site(TensorId("w"))
    assert found.spec.granularity == PerChannel(1)
    assert found.qparams.scale.shape == (56,)
    feeds = {"x": np.random.default_rng(9).standard_normal((2, 4, 16)).astype(np.float32)}
    runs = [Session(one.model, optimize=False).run(feeds) for one in (first, again)]
    for name, value in runs[0].items():
        np.testing.assert_array_equal(runs[1][name], value)
    assert onnxq.apply(join_parts(), again.plan).model == again.model


def test_weights_side_by_side_that_are_quantized_in_different_ways_are_refused() -> None:
    plan = quantize_parts(granularity="channel").plan
    for change in ({"spec": replace(plan.site(TensorId("wk")).spec, bits=4)}, None):
        sites = [replace(site, **change) if change and site.site == TensorId("wk") else site for site in plan.sites]
        kept = tuple(site for site in sites if change or site.site != TensorId("wk"))
        with pytest.raises(PlanError, match=r"wk: is a part of 'w' here.*\[Q404\]") as caught:
            onnxq.apply(join_parts(), replace(plan, sites=kept))
        assert "one of its own" in caught.value.fix


def test_weights_side_by_side_are_refused_where_the_plan_scales_what_is_made_of_one() -> None:
    plan = quantize_parts(granularity="channel").plan
    scaling = Scaling(name="smoothquant", tensor=TensorId("r"), factors=np.full(16, 2, np.float32))
    with pytest.raises(PlanError, match=r"is a part of 'w' here, .* 'r'"):
        onnxq.apply(join_parts(), replace(plan, scalings=(scaling,)))
    # What it reads may be scaled: all of them read the same.
    onnxq.apply(join_parts(), replace(plan, scalings=(replace(scaling, tensor=TensorId("x")),)))


# ---- A plan fits the same network exported again, whatever its nodes and tensors are called then, and nothing else.

BRANCHES = f"""g ({MAP} x, bool k) => ({MAP} y) {{
    a = Conv(x, w, b) r = Relu(a) i = If (k) <then_branch = t () => ({MAP} p) {{ p = Conv(r, v) }},
                else_branch = e () => ({MAP} q) {{ q = Relu(r) }}>
    c = Conv(i, v) s = Add(c, r) y = Conv(s, z) }}"""


@lru_cache(maxsize=1)
def net() -> onnx.ModelProto:
    return network(BRANCHES, w=POINT, b=(8,), v=POINT, z=POINT)


@lru_cache(maxsize=1)
def plan() -> Plan:
    return draft(net(), FORCE).default()


def fitted(plan: Plan, proto: onnx.ModelProto, **options: bool) -> Plan:
    return fit_plan(plan, get_index(proto), compute_fingerprint(proto), **options)


def renamed(proto: onnx.ModelProto, seed: int) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with other names for all but its inputs and outputs, its nodes in another order; and the new names."""
    copy, rng = onnx.ModelProto.FromString(proto.SerializeToString()), random.Random(seed)
    kept = {value.name for value in (*copy.graph.input, *copy.graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if name in kept or not name else names.setdefault(name, f"t{rng.randrange(10**6)}_{len(names)}")

    for _, graph in walk_graphs(copy.graph):
        for value in (*graph.value_info, *graph.initializer, *graph.output):
            value.name = new(value.name)
        for node in graph.node:
            node.input[:] = map(new, node.input)
            node.output[:] = map(new, node.output)
            node.name = f"n{rng.randrange(10**6)}_{node.name}"
    nodes = list(copy.graph.node)
    rng.shuffle(nodes)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy, names


@given(st.integers(0, 2**31))
@settings(max_examples=8)
def test_the_same_network_under_other_names(seed: int) -> None:
    again, names = renamed(net(), seed)
    found = fitted(plan(), again)
    wanted = draft(again, FORCE).default()
    assert {site.site for site in found.sites} == {site.site for site in wanted.sites}
    assert {(site.site, site.consumers, site.derived, site.spec) for site in found.sites} == {
        (site.site, site.consumers, site.derived, site.spec) for site in wanted.sites
    }
    assert names.get("r", "r") in {str(site.site) for site in found.sites}


def test_biases_and_float_nodes_go_by_node() -> None:
    bias = BiasPlan(edge=Edge("a", 2), values=np.zeros(8, np.float32))
    held = replace(plan(), biases=(bias,), float_nodes=("p",), nodes={**plan().nodes, "p": plan().nodes["p"]})
    again, _ = renamed(net(), 3)
    found = fitted(held, again)
    index = get_index(again)
    assert index.find_node(found.biases[0].edge.node).op_type == "Conv"
    assert index.find_node(found.biases[0].edge.node).inputs[0] == "x"
    assert index.find_node(found.float_nodes[0]).scope.endswith("then_branch")


def other_weights() -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(net().SerializeToString())
    held = copy.graph.initializer[0]
    held.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(held), held.name))
    return copy


def test_other_weights_are_an_error_unless_they_are_expected() -> None:
    calibrated = replace(plan(), biases=(BiasPlan(edge=Edge("a", 2), values=np.zeros(8, np.float32)),))
    with pytest.raises(PlanError, match=r"computed from other weights.*\[Q402\]") as caught:
        fitted(calibrated, other_weights())
    assert "`new_weights=True`" in caught.value.fix
    found = fitted(calibrated, other_weights(), new_weights=True)
    assert found.biases == ()
    assert all(site.qparams is None for site in found.sites if site.role in (Role.WEIGHT, Role.BIAS))
    assert found.weights == compute_fingerprint(other_weights()).weights


FAULTS = {
    "made otherwise": (
        plan().with_sites((*plan().sites, site("a", anchor="0" * 64))), "a", "not in this model",
        "take `anchor` out of this",
    ),
    "a float node that is not there": (
        replace(plan(), float_nodes=("yy",)), "yy", "this node is in the plan but not in this model", "'y'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("held", "subject", "cause", "fix"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_named(held: Plan, subject: str, cause: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        fitted(held, net())
    assert (caught.value.subject, caught.value.code) == (subject, "Q404")
    assert cause in caught.value.cause
    assert fix in caught.value.fix


def test_a_site_without_an_anchor_goes_by_its_name_alone() -> None:
    bare = plan().with_sites(tuple(replace(one, anchor="") for one in plan().sites))
    assert {one.site for one in fitted(bare, net()).sites} == {one.site for one in plan().sites}


def test_lasting_names_hold_where_the_graph_around_them_changed() -> None:
    """A Neg in front changes the structural id of every tensor behind it, and no name."""
    proto = network(BRANCHES.replace("a = Conv(x,", "m = Neg(x) a = Conv(m,"), w=POINT, b=(8,), v=POINT, z=POINT)
    kept = tuple(one for one in plan().sites if str(one.site) in ("r", "c", "s", "y"))
    with pytest.raises(PlanError, match="not in this model"):
        fitted(plan().with_sites(kept), proto)
    lasting = replace(plan().with_sites(kept), lasting=True, weights=digest_weights(kept, get_index(net())))
    assert [str(one.site) for one in fitted(lasting, proto).sites] == ["r", "c", "s", "y"]
