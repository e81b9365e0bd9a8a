"""Outlier channels move into the weights: free where what writes them takes it, by one Mul where it pays."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, get_index, infer_shapes
from onnxq.numerics import fake_quant, weight_qparams
from onnxq.passes.equalization import smoothquant
from onnxq.passes.equalization.passes import observe_channels
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, QuantSpec
from tests.passes.context import make_context
from tests.passes.kit import assert_same, in_branch, ops, parse

F = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


HELD = {
    "w1": normal(8, 12, seed=1), "c1": normal(12, seed=2), "w2": normal(12, 5, seed=3), "c2": normal(5, seed=4),
    "w3": normal(12, 7, seed=5), "turned": normal(5, 12, seed=6), "scale": normal(12, seed=7),
    "shift": normal(12, seed=8), "wv": normal(12, 12, seed=9), "cv": normal(12, seed=10),
    "split": np.asarray([0, 0, 3, 4], np.int64), "whole": np.asarray([0, 0, 12], np.int64),
}  # fmt: skip
# What writes h [N,6,12] from x [N,6,8], what reads it, and the node that takes 1/s in ("" for a Mul).
CASES = {
    "LayerNormalization": ("m = MatMul(x, w1) h = LayerNormalization(m, scale, shift)", "", "h/LayerNormalization"),
    "MatMul with bias": ("m = MatMul(x, w1) h = Add(m, c1)", "", "m/MatMul"),
    "bare MatMul": ("h = MatMul(x, w1)", "", "h/MatMul"),
    "Gelu": ("m = MatMul(x, w1) h = Gelu(m)", "", ""),
    "a residual reads it too": ("m = MatMul(x, w1) h = LayerNormalization(m, scale, shift)", "z = Relu(h)", ""),
    "attention": (
        """m = MatMul(x, w1) v = MatMul(m, wv) a = Add(v, cv) r = Reshape(a, split)
        t = Transpose <perm = [0,2,1,3]> (r) p = Softmax(q) o = MatMul(p, t)
        b = Transpose <perm = [0,2,1,3]> (o) h = Reshape(b, whole)""",
        "z = Relu(m)",
        "v/MatMul",
    ),
}


def model(name: str, readers: str = "o1 = MatMul(h, w2) y = Add(o1, c2) u = MatMul(h, w3)") -> ModelProto:
    made, more, _ = CASES[name]
    outputs = "float[N,6,5] y, float[N,6,7] u" + (", float[N,6,12] z" if more else "")
    text = f"g (float[N,6,8] x, float[N,3,6,6] q) => ({outputs}) {{ {made} {readers} {more} }}"
    return infer_shapes(parse(text, opset=20, **HELD))


@pytest.mark.parametrize("name", sorted(CASES))
def test_where_the_factor_goes(name: str) -> None:
    before = model(name)
    group = next(group for group in smoothquant.find_groups(get_index(before)) if group.tensor == TensorId("h"))
    home = group.home
    held = "" if home is None else getattr(home, "name", "") or home.node.name
    assert held == CASES[name][2]
    after = smoothquant.write_smoothing(before, {TensorId("h"): np.geomspace(0.1, 10, 12).astype(F)})
    assert ops(after)["Mul"] == (0 if home is not None else 1)
    assert_same(before, after, rtol=2e-5)


@settings(max_examples=25)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 10_000))
def test_any_factors_leave_the_function(name: str, seed: int) -> None:
    before = model(name)
    rng = np.random.default_rng(seed)
    factors = {
        group.tensor: np.exp(rng.uniform(-3, 3, group.channels)).astype(F)
        for group in smoothquant.find_groups(get_index(before))
    }
    assert TensorId("h") in factors
    assert_same(before, smoothquant.write_smoothing(before, factors), rtol=1e-4, seed=seed)


def test_gemm_both_ways_round_and_bodies() -> None:
    text = """g (float[N,12] x) => (float[N,5] y, float[N,5] u) {
        h = Relu(x) y = Gemm <alpha = 0.5> (h, w2, c2) u = Gemm <transB = 1> (h, turned) }"""
    before = infer_shapes(parse(text, **HELD))
    s = np.geomspace(0.1, 10, 12).astype(F)
    assert_same(before, smoothquant.write_smoothing(before, {TensorId("h"): s}), rtol=2e-5)
    inner = infer_shapes(in_branch(before))
    groups = smoothquant.find_groups(get_index(inner))
    assert [group.tensor for group in groups] == [TensorId("h", "branch.then_branch")]
    assert_same(inner, smoothquant.write_smoothing(inner, {groups[0].tensor: s}), rtol=2e-5)


STAYING = {
    "computed weights": "o1 = MatMul(h, k) y = Relu(o1)",
    "a weight with two readers": "o1 = MatMul(h, wv) y = MatMul(o1, wv)",
    "the weight on the left": "y = MatMul(wv, h)",
    "turned": "y = Gemm <transA = 1> (h, wv)",
}


@pytest.mark.parametrize("name", sorted(STAYING))
def test_what_is_no_layer_stays(name: str) -> None:
    text = f"g (float[12,12] x, float[12,12] k) => (float[12,12] y) {{ h = Relu(x) {STAYING[name]} }}"
    assert not smoothquant.find_groups(get_index(infer_shapes(parse(text, **HELD))))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="feeds no layers"):
        smoothquant.write_smoothing(model("Gelu"), {TensorId("h"): np.ones(11, F)})
    with pytest.raises(PlanError, match="feeds no layers"):
        smoothquant.write_smoothing(model("Gelu"), {TensorId("y"): np.ones(5, F)})


INT4 = QuantSpec(bits=4, signed=False, symmetric=False, granularity=PerBlock(0, 4), storage="uint4")


def test_weights_alone_are_scaled_too_where_it_is_free() -> None:
    proto = model("LayerNormalization")
    edges = [(site.name, k) for site, k in ((get_index(proto).find_node(n), 1) for n in ("o1/MatMul", "u/MatMul"))]
    sites = tuple(
        SitePlan(site=TensorId(w), role=Role.WEIGHT, spec=INT4, consumers=(Edge(node, k),))
        for w, (node, k) in zip(("w2", "w3"), edges, strict=True)
    )
    plan = Plan(target="ort", model="m", topology="", weights="", sites=sites)
    assert [group.tensor for group in smoothquant.find_quantized_groups(proto, plan)] == [TensorId("h")]
    rows = normal(50, 12, seed=1) * np.where(np.arange(12) == 5, 40, 1).astype(F)
    seen = {TensorId("h"): smoothquant.ChannelStatistics(rows.min(axis=0), rows.max(axis=0), rows)}
    factors, _ = smoothquant.compute_smoothing_factors(proto, plan, seen)
    assert list(factors) == [TensorId("h")]
    assert factors[TensorId("h")].argmax() == 5
    assert_same(proto, smoothquant.write_smoothing(proto, factors), rtol=2e-5)
    # One weight of the group in float: there is nothing that both gain from.
    assert not smoothquant.find_quantized_groups(proto, replace(plan, sites=sites[:1]))


# ---- The factors.

U8, S8 = QuantSpec(signed=False, symmetric=False), QuantSpec(granularity=PerChannel(1))


def outliers() -> tuple[smoothquant.ChannelStatistics, tuple[smoothquant.SmoothedWeight, ...]]:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 32)).astype(F)
    rows[:, [3, 17]] *= 60
    weights = (rng.standard_normal((32, 16)).astype(F), rng.standard_normal((32, 8)).astype(F))
    readers = tuple(smoothquant.SmoothedWeight(w, S8) for w in weights)
    return smoothquant.ChannelStatistics(rows.min(axis=0), rows.max(axis=0), rows), readers


def test_outliers_are_smoothed_and_the_best_alpha_wins() -> None:
    seen, readers = outliers()
    s, alpha, error, plain = smoothquant.search_smoothing_exponent(seen, readers, U8)
    weights = [r.weight for r in readers]
    exact = [seen.rows @ w for w in weights]
    factors = {a: smoothquant.compute_smoothing(seen.largest, weights, a) for a in smoothquant.SMOOTHING_ALPHAS}
    by_alpha = {a: smoothquant.measure_layer_error(seen, readers, U8, f, exact) for a, f in factors.items()}
    assert error == min(by_alpha.values()) == by_alpha[alpha]
    assert error < plain / 10
    assert np.prod(s.astype(float)) == pytest.approx(1.0, rel=1e-3)
    assert s.argsort()[-2:].tolist() in ([3, 17], [17, 3])


def test_the_formula_and_dead_channels_keep_their_size() -> None:
    weights = [np.array([[1.0, -4.0], [9.0, 0.0]], F), np.array([[2.0], [1.0]], F)]
    s = smoothquant.compute_smoothing(np.array([8.0, 2.0]), weights, 0.5)
    np.testing.assert_allclose(s[0] / s[1], np.sqrt(8 / 4) / np.sqrt(2 / 9), rtol=1e-6)
    s = smoothquant.compute_smoothing(np.array([0.0, 4.0, 1.0, 2.0]), [np.array([[1.0], [1.0], [1.0], [0.0]], F)], 0.5)
    assert s[0] == s[3] == 1.0
    np.testing.assert_allclose(s[1:3], [np.sqrt(2), np.sqrt(0.5)], rtol=1e-6)
    assert (smoothquant.compute_smoothing(np.zeros(3), [np.zeros((3, 2), F)], 0.5) == 1.0).all()


def test_awq_gives_room_to_weights_that_large_inputs_meet() -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((200, 16)).astype(F) * np.where(np.arange(16) % 4 == 1, 30, 1).astype(F)
    readers = [
        smoothquant.SmoothedWeight(normal(16, 9, seed=4), INT4),
        smoothquant.SmoothedWeight(normal(16, 5, seed=5), INT4),
    ]
    s, alpha, error, plain = smoothquant.search_awq_exponent(rows, readers)
    assert alpha in smoothquant.AWQ_ALPHAS
    assert error < 0.7 * plain
    assert set(np.argsort(s)[-4:] % 4) == {1}
    assert np.isclose(np.log(s).mean(), 0, atol=1e-5)
    # What it promises is what the rounded weights do.
    for reader in readers:
        scaled = reader.weight * s[:, None]
        rounded = fake_quant(scaled, weight_qparams(scaled, INT4), INT4)
        assert np.square((rows / s) @ rounded - rows @ reader.weight).sum() < np.square(rows @ reader.weight).sum() / 20


def test_awq_leaves_dead_inputs_finite() -> None:
    rows = np.zeros((4, 8), F)
    assert smoothquant.compute_awq_scaling(rows, 0.5).tolist() == [1.0] * 8
    rows[:, 2] = 3
    s = smoothquant.compute_awq_scaling(rows, 0.5)
    assert np.isfinite(s).all()
    assert s.argmax() == 2


A, B = TensorId("a"), TensorId("b")
TEXT = "g (float[N,3,4] x) => (float[N,3,4] y) { a = Mul(x, two) b = Relu(a) y = Neg(b) }"
MODEL = infer_shapes(parse(TEXT, two=2.0))


def dataset(x: np.ndarray, proto: onnx.ModelProto = MODEL, **more: Any) -> Dataset:
    return load_data({"x": x, **more}, GraphIndex(proto).inputs, DataConfig())


def observe(
    channels: dict[TensorId, int], samples: Dataset, proto: Any = MODEL, batch: int | None = None, **options: Any
) -> Any:
    ctx = replace(make_context(samples, data={"batch": batch}), memory_limit=options.pop("memory_limit", None))
    return observe_channels(ctx, proto, channels, samples, "", **options)


def values(count: int = 10) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 3, 4)).astype(np.float32)


@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("memory_limit", [None, 200])
def test_ends_are_those_of_each_channel_over_all_samples(batch, memory_limit):
    x = values()
    # 200 bytes hold one tensor of a sample, not two: the runs are divided.
    found = observe({A: 1, B: -1}, dataset(x), batch=batch, memory_limit=memory_limit)
    np.testing.assert_array_equal(found[A].low, (2 * x).min(axis=(0, 2)))
    np.testing.assert_array_equal(found[A].high, (2 * x).max(axis=(0, 2)))
    np.testing.assert_array_equal(found[B].low, np.zeros(4))
    np.testing.assert_array_equal(found[B].high, (2 * x).max(axis=(0, 1)))


@pytest.mark.parametrize(("rows", "kept"), [(0, 0), (10, 10), (25, 25), (12, 12), (1000, 30)])
def test_rows_are_spread_over_the_samples(rows, kept):
    x = values()
    held = observe({A: -1}, dataset(x), rows=rows, batch=1)[A].rows
    assert held.shape == (kept, 4)
    assert held.dtype == np.float32
    # Each is a row of the tensor.
    whole = (2 * x).reshape(-1, 4)
    assert all((whole == row).all(axis=1).any() for row in held)
    # As many of each sample.
    places = [int(np.flatnonzero((whole == row).all(axis=1))[0]) // 3 for row in held]
    assert rows != 10 or sorted(places) == list(range(10))


def test_padding_gives_no_rows():
    text = "g (float[N,3,4] x, int64[N,3] mask) => (float[N,3,4] y) { a = Mul(x, two) y = Neg(a) }"
    proto = infer_shapes(parse(text, two=2.0))
    x = values(4)
    x[:, 2] = 77
    mask = np.array([[1, 1, 0]] * 4, np.int64)
    found = observe({A: -1}, dataset(x, proto, mask=mask), proto, rows=40)
    assert len(found[A].rows) == 8
    assert not (found[A].rows == 2 * 77).any()


@pytest.mark.parametrize(("op", "bad"), [("Sqrt", -1.0), ("Log", 0.0), ("Reciprocal", 0.0)], ids=["NaN", "-inf", "inf"])
def test_a_tensor_with_nan_or_inf_is_left_out(op, bad):
    proto = infer_shapes(parse(f"g (float[N,3,4] x) => (float[N,3,4] y) {{ a = {op}(x) b = Neg(x) y = Add(a, b) }}"))
    x = np.abs(values(4))
    assert set(observe({A: 1, B: 1}, dataset(x, proto), proto)) == {A, B}
    x[2, 0, 0] = bad
    assert set(observe({A: 1, B: 1}, dataset(x, proto), proto)) == {B}


def test_a_tensor_of_a_branch_that_no_sample_took_is_left_out():
    proto = infer_shapes(in_branch(parse("g (float[2,4] x) => (float[2,4] y) { a = Mul(x, x) y = Neg(a) }")))
    scope = next(node.scope for node in GraphIndex(proto).nodes if node.op_type == "Mul")
    inner = TensorId("a", scope)
    x = values(1)[0, :2]

    def seen(flag: bool) -> dict[TensorId, Any]:
        data = load_data([{"x": x, "flag": np.array(flag)}], GraphIndex(proto).inputs, DataConfig())
        return observe({inner: 1}, data, proto)

    assert seen(False) == {}
    np.testing.assert_allclose(seen(True)[inner].high, (x * x).max(axis=0))


def test_without_tensors_nothing_runs():
    assert observe({}, dataset(values(1))) == {}
