"""Bias absorption: the float function stays, ranges shrink, and what cannot be made up for is left alone."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxq
from onnxq.errors import PlanError
from onnxq.graph import infer_shapes
from onnxq.passes.equalization.cross_layer import (
    choose_shifts,
    compute_shifts,
    list_shift_axes,
    list_sources,
    write_shifts,
)
from onnxq.passes.equalization.smoothquant_core import ChannelStatistics
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import TensorId
from tests.passes.kit import parse
from tests.pipeline.models import BALANCED, find_worst_db, list_accounts, quantize, to_bytes

F = np.float32


def network(body: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A network on [N,8,6,6] whose channels stand apart."""
    rng, arrays = np.random.default_rng(5), {}
    for name, shape in weights.items():
        scale = 6.0 if len(shape) == 1 else np.prod(shape[1:]) ** -0.5
        arrays[name] = (rng.standard_normal(shape) * scale).astype(F)
    return infer_shapes(parse(f"g (float[N,8,6,6] x) => (float[N,8,6,6] y) {{ {body} }}", **arrays))


W = (8, 8, 1, 1)
RESIDUAL = network(
    """a = Conv(x, w0, b0) b = Conv(a, w1, b1) r = Relu(b) c = Conv <group = 2> (r, w2) s = Add(a, c)
    d = Conv <group = 4> (s, w3) t = Add(s, d) y = Conv <group = 8> (t, w4, b4)""",
    **dict.fromkeys(("w0", "w1"), W),
    w2=(8, 4, 1, 1),
    w3=(8, 2, 1, 1),
    w4=(8, 1, 1, 1),
    **dict.fromkeys(("b0", "b1", "b4"), (8,)),
)
PADDED = {"w": W, "b": (8,), "v": (8, 8, 3, 3)}
PLAIN = {"w": W, "b": (8,), "v": W}
LEFT = {
    "padding behind it": ("a = Conv(x, w, b) y = Conv<pads=[1,1,1,1]>(a, v)", PADDED),
    "automatic padding": ('a = Conv(x, w, b) y = Conv<auto_pad="SAME_UPPER">(a, v)', PADDED),
    "another reader": ("a = Conv(x, w, b) c = Conv(a, v) s = Sigmoid(a) y = Mul(c, s)", PLAIN),
    # Whatever the samples show, new inputs have values below any shift.
    "a Relu": ("a = Conv(x, w, b) r = Relu(a) y = Conv(r, v)", PLAIN),
    "a Clip": ("a = Conv(x, w, b) l = Constant<value_float=6.0>() c = Clip(a, , l) y = Conv(c, v)", PLAIN),
    "a graph output": ("y = Conv(x, w, b)", {"w": W, "b": (8,)}),
    "a product": ("a = Conv(x, w, b) m = Mul(a, x) y = Conv(m, v)", PLAIN),
    "an Add with a constant": ("a = Conv(x, w, b) s = Add(a, k) y = Conv(s, v)", {**PLAIN, "k": W}),
    "a bias for one row": ("a = Conv(x, w, b) y = MatMul(a, v)", {**PLAIN, "v": (6, 6)}),
}
FEEDS = {"x": np.random.default_rng(2).standard_normal((3, 8, 6, 6)).astype(F)}


def values(proto: onnx.ModelProto, *names: str) -> dict[str, np.ndarray]:
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return Session(copy, optimize=False).run(FEEDS)


def statistics(value: np.ndarray) -> ChannelStatistics:
    low, high = (end.astype(float) for end in (value.min((0, 2, 3)), value.max((0, 2, 3))))
    return ChannelStatistics(low, high, np.zeros((0, len(low)), F))


def test_the_function_stays_and_the_channels_are_centred() -> None:
    axes = list_shift_axes(RESIDUAL)
    assert {tensor.name for tensor in axes} == {"a", "c", "d"}
    seen = values(RESIDUAL, *(tensor.name for tensor in axes))
    chosen = choose_shifts(RESIDUAL, {t: statistics(seen[t.name]) for t in axes})
    assert TensorId("a") in chosen
    made = write_shifts(RESIDUAL, chosen)
    after = values(made, *(tensor.name for tensor in axes))
    assert np.allclose(after["y"], seen["y"], atol=2e-4)
    for tensor in chosen:
        assert np.ptp(after[tensor.name]) < np.ptp(seen[tensor.name])
    onnx.checker.check_model(made)
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in RESIDUAL.graph.node]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0, 9)), min_size=1))
def test_shifts_never_widen_the_range(channels: list[tuple[float, float]]) -> None:
    low = np.array([start for start, _ in channels])
    high = low + np.array([width for _, width in channels])
    c = compute_shifts(low, high)
    before, after = max(high.max(), 0) - min(low.min(), 0), max((high - c).max(), 0) - min((low - c).min(), 0)
    assert after <= before + 1e-5


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_alone(why: str) -> None:
    body, weights = LEFT[why]
    assert list_sources(network(body, **weights)) == []


def test_gemm_and_matmul_take_it() -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 5), "b": (5,), "v": (5, 4), "c": (4,)}
    text = """g (float[N,8,6,6] x) => (float[N,6,6,4] y) {
        t = Transpose<perm=[0,2,3,1]>(x) m = MatMul(t, w) a = Add(m, b) n = MatMul(a, v) y = Add(n, c) }"""
    weights = {name: rng.standard_normal(shape).astype(F) for name, shape in shapes.items()}
    proto = infer_shapes(parse(text, **weights))
    assert list_shift_axes(proto) == {TensorId("a"): -1}
    made = write_shifts(proto, {TensorId("a"): np.arange(5, dtype=F)})
    assert np.allclose(values(made, "a")["a"], values(proto, "a")["a"] - np.arange(5), atol=1e-5)
    assert np.allclose(values(made)["y"], values(proto)["y"], atol=1e-4)


def test_a_tensor_that_cannot_be_lowered_is_an_error() -> None:
    with pytest.raises(PlanError, match="cannot take the shifts"):
        write_shifts(RESIDUAL, {TensorId("b"): np.ones(8, F)})
    with pytest.raises(PlanError, match="cannot take the shifts"):
        write_shifts(RESIDUAL, {TensorId("a"): np.ones(7, F)})


def test_a_run_absorbs_says_so_and_a_plan_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.passes.equalization.passes._GOOD_DB", 99.0)
    data = {"x": np.random.default_rng(3).standard_normal((40, 8, 6, 6)).astype(F)}
    skip = ("cross_layer_equalization", "rounding", "low_bit_search")
    high = BALANCED.model_copy(update={"effort": "high"})
    done, plain = (quantize(RESIDUAL, data, config, skip=skip) for config in (high, BALANCED))
    assert {scaling.name for scaling in done.plan.scalings} == {"bias_absorption"}
    assert "max |difference|" in list_accounts(done, "bias_absorption")[0]
    assert find_worst_db(done) > find_worst_db(plain) - 0.5
    assert to_bytes(onnxq.apply(RESIDUAL, from_json(to_json(done.plan), source="plan"))) == to_bytes(done)
    # Shifts go below 0, which factors must not.
    assert any((scaling.factors < 0).any() for scaling in done.plan.scalings)
