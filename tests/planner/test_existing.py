"""Pairs that a model came with: shared where they fit, never written twice, told from what engines quantize alone."""

from functools import lru_cache

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxq.annotate import find_existing
from onnxq.backends import load_config
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, get_index
from onnxq.plan import Plan, SitePlan
from onnxq.planner import NOTHING, Existing, digest_weights, find_needed_opset, state_placement
from onnxq.planner.match import check_site, drop_orphans
from onnxq.planner.problem import is_between_pairs
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, QuantSpec
from tests.networks import add_arrays
from tests.planner.kit import FORCE, MAP, POINT, groups, network, reasons, site, table

# A quantized convolution `a`, a pooling behind it, a float convolution `c`, and another reader of the input, `u`.
TEXT = f"""g ({MAP} x) => ({MAP} y, {MAP} u)
    <float s = {{0.1}}, uint8 z = {{128}}, float p = {{0.05}}, uint8 o = {{0}}> {{
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) wd = DequantizeLinear<axis=0>(wq, ws)
    a = Conv(d, wd) r = Relu(a) rq = QuantizeLinear(r, p, o) rd = DequantizeLinear(rq, p, o)
    m = MaxPool<kernel_shape=[1,1]>(rd) c = Conv(m, v) y = Relu(c) u = Conv(x, v2)
}}"""


@lru_cache(maxsize=1)
def model() -> onnx.ModelProto:
    proto = network(TEXT, v=POINT, v2=POINT)
    add_arrays(proto.graph, wq=np.ones(POINT, np.int8), ws=np.full(8, 0.01, np.float32))
    return onnx.shape_inference.infer_shapes(proto)


def plan_for(proto: onnx.ModelProto, preset: str = "ort-int8", *rules: dict, **changes: object) -> Plan:
    config = load_config(preset, {"rules": list(rules), **changes})
    return state_placement(proto, config, existing=find_existing(proto)).default()


def test_only_what_is_float_gets_pairs_and_joins_those_that_are_there() -> None:
    plan = plan_for(model(), "ort-int8", FORCE)
    assert table(plan) == {
        "m": "activation: *", "v": "weight: c/in1", "y": "output: *", "v2": "weight: u/in1", "u": "output: *",
    }  # fmt: skip
    readers = {str(site.site): tuple(map(str, site.consumers or ())) for site in plan.existing}
    assert readers == {"x": ("a/in0", "u/in0"), "r": ("m/in0",), "wq": ("a/in1",)}
    assert plan.kept == ("q", "d", "wd", "rq", "rd")
    assert reasons(plan) == {}


def test_a_pair_behind_a_node_that_moves_bytes_takes_the_numbers_of_the_one_in_front() -> None:
    plan = plan_for(model(), "ort-int8", FORCE)
    given, taken = plan.site(TensorId("r")), plan.site(TensorId("m"))
    assert groups(plan) == {frozenset("m")}
    assert taken.qparams == given.qparams
    assert taken.spec == given.spec
    assert all(site.qparams is None for site in plan.sites if site is not taken)


def test_a_rule_cannot_take_a_kept_pair_away() -> None:
    (refusal,) = plan_for(model(), "ort-int8", {"node": "a", "set": {"float": True}}, FORCE).refusals
    assert (refusal.subject, refusal.rule, refusal.code) == ("a", "kept", "R115")
    assert refusal.reason == "already quantized in the model, and kept so, though rule node=a -> float leaves it float"
    assert refusal.fix == "quantize the float model"


def test_pairs_that_a_strict_target_cannot_read_are_told() -> None:
    plan = plan_for(model(), "trt-int8")
    (line,) = (line for line in plan.warnings if line.code == "W125")
    assert line.startswith("2 of the pairs that the model came with are kept, though trt does not read them, e.g. x (")
    assert table(plan) == {"m": "activation: c/in0", "v": "weight: c/in1"}
    assert reasons(plan) == {"u": ("conv", "R103")}  # it would share the uint8 pair


@pytest.mark.parametrize(("signed", "told"), [(False, 0), (True, 1)])
def test_new_activations_take_the_sign_of_those_that_are_there(signed: bool, told: int) -> None:
    plan = plan_for(model(), "ort-int8", FORCE, **{"activations.signed": signed})
    assert {site.spec.storage for site in plan.sites if site.role is not Role.WEIGHT} == {"uint8"}
    lines = [line for line in plan.warnings if line.code == "W124"]
    assert len(lines) == told
    assert not lines or lines[0] == "activations are uint8 like the pairs that the model came with, not int8"


def test_a_pair_serves_readers_of_its_own_graph() -> None:
    outer, inner, other = site("t"), site(TensorId("u", "i.body")), site("t2")
    found = Existing(
        by_tensor={TensorId("t"): outer, TensorId("u", "i.body"): inner},
        by_edge={Edge("n", 0): other},
        constants=(site("w"),),
    )
    assert found.pair_for(Edge("m", 0), TensorId("t")) is outer
    assert found.pair_for(Edge("n", 0), TensorId("t")) is other  # its own comes first
    assert found.pair_for(Edge("m", 0, "i.body"), TensorId("t")) is None
    assert found.pair_for(None, TensorId("u", "i.body")) is inner
    assert found.pair_for(Edge("m", 0), TensorId("v")) is None
    assert found.sites == (outer, inner, other, *found.constants)


MOVED = f"""g ({MAP} x) => ({MAP} y, {MAP} e, {MAP} k) <float s = {{0.1}}, uint8 z = {{128}}> {{
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
    t = Transpose<perm=[0,1,3,2]>(d) p = AveragePool<kernel_shape=[1,1]>(t) r = Relu(p)
    rq = QuantizeLinear(r, s, z) y = DequantizeLinear(rq, s, z) b = Softmax(d) e = Exp(b)
    h = Softmax(x) hq = QuantizeLinear(h, s, z) hd = DequantizeLinear(hq, s, z) k = Neg(hd)
}}"""


def test_engines_quantize_by_themselves_between_two_pairs_alone() -> None:
    proto = network(MOVED)
    found = find_existing(proto)
    view = get_index(found.view)
    # A pair in front of p, behind a Transpose, and one behind it, behind a Relu; b has none behind, h none in front.
    assert {name for name in "pbh" if is_between_pairs(view, found, name)} == {"p"}
    assert not any(is_between_pairs(get_index(proto), NOTHING, node.name) for node in proto.graph.node)
    weighted = find_existing(model())
    assert is_between_pairs(get_index(weighted.view), weighted, "a")
    # Those are not guarded against it.
    assert plan_for(proto).float_nodes == ("b", "h")


@pytest.mark.parametrize("preset", ["ort-int8", "trt-int8"])
def test_pairs_in_a_branch_that_nobody_reads_do_no_harm(preset: str) -> None:
    plan = plan_for(network(MOVED.replace(f", {MAP} k)", ")")), preset)
    assert "h" not in plan.float_nodes
    assert {"hq", "hd"} <= set(plan.kept)


def half_quantized(code: int = 1, zero: int = 0) -> onnx.ModelProto:
    """A convolution whose weight alone has a pair, and one whose result is read by a pair and given out."""
    text = f"""g ({MAP} x) => ({MAP} y, {MAP} h) <float s = {{0.1}}, uint8 z = {{128}}> {{
        wd = DequantizeLinear<axis=0>(wq, ws, wz) a = Conv(x, wd) r = Relu(a)
        h = Conv(r, v) q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) y = Neg(d)
    }}"""
    proto = network(text, v=(8, 8, 1, 1))
    codes, zeros = np.full((8, 8, 1, 1), code, np.int8), np.full(8, zero, np.int8)
    add_arrays(proto.graph, wq=codes, ws=np.full(8, 0.01, np.float32), wz=zeros)
    return proto


def test_an_operator_whose_weight_alone_has_a_pair_gets_the_others() -> None:
    plan = plan_for(half_quantized(), "ort-int8", FORCE)
    assert table(plan) == {"x": "activation: a/in0", "r": "activation: *"}
    (weight,) = (pair for pair in plan.existing if pair.role is Role.WEIGHT)
    assert (weight.site, weight.consumers) == (TensorId("wq"), (Edge("a", 1),))
    assert {line.subject: line.code for line in plan.left_float} == {"h": "F107"}


@pytest.mark.parametrize(
    ("preset", "code", "zero", "obstacle"),
    [
        ("ort-int8", 127, 0, "in integers whose sums overflow 16 bits on CPUs without VNNI"),
        ("trt-int8", 1, 3, "in a form that only float data are multiplied by"),
    ],
)
def test_an_operator_whose_weight_no_kernel_reads_stays_as_is(preset: str, code: int, zero: int, obstacle: str) -> None:
    plan = plan_for(half_quantized(code, zero), preset, FORCE)
    assert "a" not in {edge.node for site in plan.sites for edge in site.consumers or ()}
    (line,) = (line for line in plan.left_float if line.subject == "a")
    assert line.reason.startswith(f"its weight is already quantized in the model, {obstacle}")


def test_weights_that_are_stored_already_are_not_quantized_again() -> None:
    assert list(table(plan_for(half_quantized(), "ort-int8-weights", FORCE))) == ["v"]


def test_an_operator_stays_float_that_gives_its_result_out_beside_a_pair() -> None:
    plan = plan_for(half_quantized(), "ort-int8", FORCE)
    assert {line.subject: (line.rule, line.code, line.reason) for line in plan.left_float} == {
        "h": ("kept", "F107", "the model gives its result out in float beside a pair that is kept"),
    }


# ---- Sites that a person added, changed or took out of a plan: what goes with them, and what no longer fits.


@lru_cache(maxsize=1)
def index() -> GraphIndex:
    text = "g (float[4,8] x, float16[4] h) => (float[4,8] y, float[4,8] u, float16[4] k) {"
    return GraphIndex(network(f"{text} y = Gemm(x, w, b) u = MatMul(x, w) k = Neg(h) }}", w=(8, 8), b=(8,)))


X, W, B = TensorId("x"), TensorId("w"), TensorId("b")


@pytest.mark.parametrize(
    ("held", "existing", "kept", "missing"),
    [
        (("x", "w", "b"), (), ["x", "w", "b"], None),
        (("x", "b"), (), ["x"], "w"),
        (("w", "b"), (), ["w"], "x"),
        (("b",), (), [], "x"),
        # A pair that the model came with is as good as a site.
        (("w", "b"), ("x",), ["w", "b"], None),
    ],
)
def test_a_bias_goes_with_what_its_scale_follows_from(
    held: tuple[str, ...], existing: tuple[str, ...], kept: list[str], missing: str | None
) -> None:
    sites = tuple(site(name, derived=(X, W) if name == "b" else None) for name in held)
    left, lines = drop_orphans(sites, [site(name) for name in existing])
    assert [str(one.site) for one in left] == kept
    assert [(line.code, str(line)) for line in lines] == [
        ("W121", f"b: left float, its scale follows from {missing}, which is not in the plan")
    ] * (missing is not None)


def test_weights_get_the_readers_that_nobody_named() -> None:
    found = [site("w", Role.WEIGHT), site(Edge("y", 2), Role.BIAS), site("x")]
    assert [check_site(one, index()).consumers for one in found] == [
        (Edge("y", 1), Edge("u", 1)),
        (Edge("y", 2),),
        None,
    ]
    named = site("w", Role.WEIGHT, consumers=(Edge("u", 1),))
    assert check_site(named, index()) == named


FAULTS = {
    "a computed bias": (site("x", Role.BIAS), "Q404", "as a bias is"),
    "an axis below the first": (
        site("w", Role.WEIGHT, spec=QuantSpec(granularity=PerBlock(-3, 4))), "Q403", "axis -3 is outside",
    ),
    "values of an activation": (site("x", values=np.zeros((4, 8), np.int8)), "Q408", "do not fit a computed tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("found", "code", "cause"), FAULTS.values(), ids=FAULTS)
def test_sites_that_do_not_fit_their_tensor(found: SitePlan, code: str, cause: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_site(found, index())
    assert (caught.value.subject, caught.value.code) == (str(found.site), code)
    assert cause in caught.value.cause
    assert caught.value.fix


@pytest.mark.parametrize("axis", [-2, 0, 1])
def test_axes_inside_the_shape_are_taken(axis: int) -> None:
    found = site("w", Role.WEIGHT, spec=QuantSpec(granularity=PerChannel(axis)), values=np.zeros((8, 8), np.int8))
    assert check_site(found, index()).values is found.values


@pytest.mark.parametrize(
    ("found", "opset"),
    [
        ([], 13),
        ([site("x")], 13),
        ([site("x", spec=QuantSpec(bits=16))], 21),
        ([site("w", spec=QuantSpec(bits=4, storage="int4"))], 21),
        ([site("w", spec=QuantSpec(granularity=PerBlock(0, 4)))], 21),
        ([site("x", spec=QuantSpec(storage="float8e4m3fn"))], 19),
        ([site("x", spec=QuantSpec(storage="float8e4m3fn")), site("x", spec=QuantSpec(bits=16))], 21),
    ],
)
def test_the_opset_that_pairs_need(found: list[SitePlan], opset: int) -> None:
    assert find_needed_opset(found) == opset


def digest(*values: np.ndarray) -> str:
    proto = onnx.ModelProto()
    proto.graph.name = "g"
    names = [f"w{k}" for k in range(len(values))]
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for v, n in zip(values, names, strict=True))
    return digest_weights([site(name, Role.WEIGHT) for name in names] + [site("elsewhere")], GraphIndex(proto))


def test_the_digest_tells_values_types_shapes_and_order() -> None:
    one, two = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
    same = digest(one, two)
    assert same == digest(one.copy(), two.copy())
    changed = [(two, one), (one,), (one.reshape(2, 3), two), (one.astype(np.float64), two), (one + 1, two)]
    assert len({same, *(digest(*values) for values in changed)}) == len(changed) + 1


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_the_digest_is_of_the_float32_network_that_a_narrow_one_is_widened_to(kind: type) -> None:
    one = np.arange(6, dtype=np.float32)
    assert digest(one.astype(kind)) == digest(one)


@pytest.mark.parametrize("preset", ["qnn", "virtual-int8"])
def test_scales_and_sums_of_products_on_integers_get_no_pairs(preset: str) -> None:
    """They belong to the product as much as its integers do; sixteen bits for scales of 1e-9 cost accuracy."""
    proto = network(f"""g ({MAP} x) => ({MAP} y) {{
        q, s, z = DynamicQuantizeLinear(x) m = MatMulInteger(q, wq, z) c = Cast<to=1>(m) f = Mul(s, ws)
        p = Mul(c, f) y = Mul(p, x)
    }}""")
    add_arrays(proto.graph, wq=np.ones((8, 8), np.int8), ws=np.array(0.01, np.float32))
    plan = plan_for(onnx.shape_inference.infer_shapes(proto), preset, FORCE)
    assert {str(place.site) for place in plan.sites} <= {"p", "x", "y"}
