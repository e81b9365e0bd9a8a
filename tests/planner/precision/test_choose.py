"""Which nodes stay in float32 beside float16, why, and that as few Casts as possible stand between."""

from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.backends import find_target, load_config
from onnxq.calibrate import measure_float_errors
from onnxq.graph import get_index, infer_shapes
from onnxq.plan import KeepReason, Plan, PrecisionPlan, from_json, to_json
from onnxq.planner import PrecisionProblem, add_precision, choose_types, find_suspects, find_type_opset
from onnxq.planner.precision.reasons import round_figure
from onnxq.planner.requests import Requests
from onnxq.spec import FloatType
from tests.passes.kit import in_branch, parse

F16, BF16 = FloatType.FLOAT16, FloatType.BFLOAT16


def problem(proto: onnx.ModelProto, samples: Any, kind: FloatType = F16, **changes: Any) -> PrecisionProblem:
    typed = infer_shapes(proto)
    index = get_index(typed)
    return PrecisionProblem(
        index=index, plan=Plan(target="trt", model="", topology="", weights=""), kind=kind,
        requests=Requests(load_config("trt-fp16", changes), index), engine=find_target("trt", "float"),
        errors=measure_float_errors(typed, kind, samples), opset=22 if kind is BF16 else 19,
    )  # fmt: skip


def reasons(chosen: PrecisionPlan) -> dict[str, KeepReason]:
    return {one.node: one.reason for one in chosen.kept}


def normal(*shape: int, factor: float = 1.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": (factor * rng.standard_normal(shape)).astype(np.float32)} for _ in range(4)]


NORM = """g (float[4,64] x) => (float[4,64] y) {
    m = ReduceMean <axes=[1]> (x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean <axes=[1]> (s) e = Add(v, epsilon)
    r = Sqrt(e) n = Div(d, r) y = MatMul(n, w)
}"""


def test_sums_of_a_norm() -> None:
    """Squares up to 40² sum up to 40² · 64, beyond a quarter of 65504, though the mean of them is far below."""
    net = parse(NORM, opset=17, epsilon=1e-3, w=np.eye(64, dtype=np.float32))
    loud = reasons(choose_types(problem(net, normal(4, 64, factor=24.0))))
    assert loud["v/ReduceMean"] is KeepReason.SUM
    assert "y/MatMul" not in loud
    assert reasons(choose_types(problem(net, normal(4, 64)))) == {}


def test_an_epsilon_that_vanishes_is_kept_up_to_the_quotient() -> None:
    """No sample has a variance of 0, but another may: float16 would divide by it."""
    net = parse(NORM, opset=17, epsilon=1e-12, w=np.eye(64, dtype=np.float32))
    found = reasons(choose_types(problem(net, normal(4, 64))))
    assert {found[name] for name in ("e/Add", "r/Sqrt", "n/Div")} == {KeepReason.SMALL}
    assert "y/MatMul" not in found
    assert reasons(choose_types(problem(net, normal(4, 64), BF16))) == {}


def test_small_differences_of_large_numbers() -> None:
    text = "g (float[4,64] x) => (float[4,64] y) { a = Add(x, k) \n b = Relu(a) \n d = Sub(b, k) \n y = MatMul(d, w) }"
    net = parse(text, opset=17, k=np.float32(4000), w=np.eye(64, dtype=np.float32))
    found = reasons(choose_types(problem(net, normal(4, 64))))
    assert found["d/Sub"] is KeepReason.PRECISION
    # What it reads must not have been rounded either.
    assert {"a/Add", "b/Relu"} <= set(found)
    assert "y/MatMul" not in found


def test_positions_stay_exact() -> None:
    text = """g (float[N,8] x) => (float[M,8] y, int64[1] i) {
        n = Shape <end=1> (x) f = Cast <to=1> (n) h = Mul(f, half) p = Floor(h) i = Cast <to=7> (p) y = MatMul(x, w)
    }"""
    net = parse(text, opset=17, half=0.5, w=np.eye(8, dtype=np.float32))
    assert reasons(choose_types(problem(net, normal(4, 8)))) == dict.fromkeys(
        ("f/Cast", "h/Mul", "p/Floor"), KeepReason.SHAPES
    )


def test_nodes_between_wide_ones_save_casts() -> None:
    """A Relu between two wide sums would need two Casts; a product is narrow all the same."""
    text = """g (float[4,8] x) => (float[4,8] y) {
        a = Mul(x, big) b = Relu(a) c = Mul(b, small) d = Neg(c) e = Mul(d, big) f = MatMul(c, w) g = Mul(f, big)
        y = Add(e, g) }"""
    net = parse(text, opset=17, big=np.float32(1e5), small=np.float32(1e-5), w=np.eye(8, dtype=np.float32))
    found = reasons(choose_types(problem(net, normal(4, 8))))
    assert found["d/Neg"] is KeepReason.CASTS
    assert "f/MatMul" not in found
    assert found["b/Relu"] is KeepReason.OVERFLOW


def test_branches_that_never_ran() -> None:
    net = in_branch(parse("g (float[4,8] x) => (float[4,8] y) { y = MatMul(x, w) }", w=np.eye(8, dtype=np.float32)))
    for flag, wanted in ((True, {}), (False, {"y/MatMul": KeepReason.UNSEEN})):
        runs = [{**one, "flag": np.array(flag)} for one in normal(4, 8)]
        found = reasons(choose_types(problem(net, runs)))
        assert {name: reason for name, reason in found.items() if "MatMul" in name} == wanted


def test_suspects_begin_with_the_node_that_loses_most() -> None:
    text = "g (float[4,64] x) => (float[4,64] y) { a = Add(x, k) \n b = Sub(a, k) \n y = MatMul(b, w) }"
    one = problem(parse(text, opset=17, k=np.float32(30), w=np.eye(64, dtype=np.float32)), normal(4, 64))
    chosen = choose_types(one)
    assert not chosen.kept
    order = list(find_suspects(one, chosen))
    assert order[0].node == "b/Sub"
    assert reasons(choose_types(one, more={order[0].node: order[0]}))["b/Sub"] is KeepReason.TRIAL


def test_figures_are_finite() -> None:
    """0 times the lowest number is NaN in float16, where that number is -inf; exact nodes lose nothing at all."""
    text = (
        "g (float[4,64] x) => (float[4,64] y) { r = Relu(x) \n z = Mul(r, zero) \n m = Mul(z, low) \n y = Add(x, m) }"
    )
    masked = problem(parse(text, opset=17, low=np.finfo(np.float32).min, zero=np.float32(0)), normal(4, 64))
    chosen = choose_types(masked)
    assert reasons(chosen)["m/Mul"] is KeepReason.OVERFLOW
    figures = [one.figure for one in (*chosen.kept, *find_suspects(masked, PrecisionPlan(type=F16)))]
    assert np.isfinite(figures).all()
    assert np.isfinite([round_figure(figure) for figure in (np.nan, np.inf, -np.inf)]).all()
    plan = add_precision(masked.plan, chosen, None)
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize(("kind", "opset"), [(F16, 13), (BF16, 22), (FloatType.FLOAT32, 13)])
def test_opset_of_a_plan_without_pairs(kind: FloatType, opset: int) -> None:
    plan = Plan(target="trt", model="", topology="", weights="")
    assert max(13, find_type_opset(plan, kind)) == opset
    assert add_precision(plan, PrecisionPlan(type=kind), None).opset == opset


def test_the_mask_of_attention_in_one_node_is_limited() -> None:
    text = """g (float[1,2,4] x, bool[1,1,2,2] seen) => (float[1,2,4] y) {
        mask = Where(seen, zero, lowest) y = com.microsoft.MultiHeadAttention <num_heads = 1> (x, x, x, , , mask) }"""
    net = parse(text, zero=np.float32(0), lowest=np.finfo(np.float32).min)
    feeds = [one | {"seen": np.array([[[[True, False], [True, True]]]])} for one in normal(1, 2, 4)]
    chosen = choose_types(problem(net, feeds))
    assert not chosen.kept
    assert [(edge.node, edge.index) for edge in chosen.limited] == [
        ("mask/Where", 2), ("y/MultiHeadAttention", 5),
    ]  # fmt: skip


def test_rows_cut_out_of_a_table_are_no_positions() -> None:
    text = """g (float[4,4] x) => (float[4,4] y) {
        n = Shape(x) end = Slice(n, zero, one) t = Slice(w, zero, end) y = MatMul(x, t) }"""
    table = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
    assert not choose_types(problem(parse(text, zero=np.array([0]), one=np.array([1]), w=table), normal(4, 4))).kept
