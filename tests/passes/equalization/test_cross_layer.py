"""Channels are scaled where the factors cancel, and shifted where biases make up for it, and nowhere else."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

import onnxq
from onnxq.errors import PlanError
from onnxq.graph import infer_shapes
from onnxq.passes.equalization import cross_layer
from onnxq.passes.equalization.cross_layer import equalize_values
from onnxq.passes.equalization.smoothquant import ChannelStatistics
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import TensorId
from tests.passes.kit import assert_same, constant, in_branch, parse, read_by
from tests.pipeline.models import BALANCED, find_worst_db, list_accounts, quantize, to_bytes

F = np.float32


def uneven(*shape: int, axis: int = 0, seed: int = 0) -> np.ndarray:
    """Normal values whose channels along `axis` differ a thousandfold in size."""
    rng = np.random.default_rng(seed)
    size = [1] * len(shape)
    size[axis] = -1
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-1.5, 1.5, shape[axis]).reshape(size)).astype(F)


EXTRA = {
    "slope": uneven(6, 1, 1),
    "low": 0.0,
    "six": 6.0,
    "most": 3.4028234e38,
    "least": -3.4028234e38,
    "amounts": np.asarray([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    "w": uneven(6, 4, 3, 3),
    "b": uneven(6, seed=1),
    "u": uneven(5, 6, 1, 1),
    "c": uneven(5),
    "w1": uneven(1, 4, 1, 1),
    "w10": uneven(5, 10, 1, 1),
    "turned": uneven(6, 5, 2, 2, seed=3),
    "turned6": uneven(6, 1, 2, 2, seed=3),
    "flat": uneven(384, 5, seed=4),
    "matrix": uneven(6, 5, seed=5),
    "matrix_t": uneven(5, 6, seed=5),
    "to": np.array([6, 384], np.int64),
    "mixed": np.array([-1, 6], np.int64),
}
IMAGE, MATRIX = "float[A,B,C,D] y", "float[A,B] y"
HEAD = "h = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w, b)"
GATE = "q = GlobalAveragePool(x) o = ReduceMax <axes = [1]> (q)"
POOLED = "r = Relu(h) p = GlobalAveragePool(r) f = Flatten(p)"
H = TensorId("h")


def chain(behind: str, out: str = IMAGE, **other: np.ndarray) -> ModelProto:
    """A convolution that writes h, of six channels, and what is behind it."""
    lines = f"{HEAD} {behind}"
    held = read_by(lines, {**EXTRA, **other})
    return infer_shapes(parse(f"g (float[6,4,8,8] x) => ({out}) {{ {lines} }}", **held))


def row(step: str, groups: int = 1) -> ModelProto:
    """Conv, `step` from h to r, Conv: 6 channels between."""
    behind = f"{step} d = Conv <kernel_shape = [3,3], group = {groups}> (r, v) y = Conv (d, u, c)"
    return chain(behind, v=uneven(6, 6 // groups, 3, 3))


PASSING = {
    "nothing": "r = Identity(h)",
    "Relu": "r = Relu(h)",
    "LeakyRelu": "r = LeakyRelu <alpha = 0.2> (h)",
    "PRelu": "r = PRelu(h, slope)",
    "Clip from 0": "r = Clip(h, low)",
    "Clip to the largest float32, as exporters write it": "r = Clip(h, low, most)",
    "Clip without bounds": "r = Clip(h, least, most)",
    "MaxPool": "p = Relu(h) r = MaxPool <kernel_shape = [2,2]> (p)",
    "AveragePool": "r = AveragePool <kernel_shape = [2,2]> (h)",
    "Pad": 'r = Pad <mode = "edge"> (h, amounts)',
    "gate": "q = GlobalAveragePool(x) p = Sigmoid(q) o = ReduceMax(p) r = Mul(o, h)",
    "divided by a gate": f"{GATE} r = Div(h, o)",
    "twice": "r = Add(h, h)",
    "constant factor": "r = Mul(h, slope)",
}


@pytest.mark.parametrize("name", sorted(PASSING))
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_function_stays_and_channels_become_alike(name: str, groups: int) -> None:
    model = row(PASSING[name], groups)
    factors = {H: np.geomspace(0.25, 4, 6).astype(F), TensorId("d"): np.geomspace(9, 0.1, 6).astype(F)}
    result = cross_layer.write_scales(model, factors)
    scaled = constant(model, "h/Conv", 1) * factors[H].reshape(6, 1, 1, 1)
    np.testing.assert_allclose(constant(result, "h/Conv", 1), scaled)
    assert_same(model, result, rtol=2e-5)


@pytest.mark.parametrize(
    ("behind", "out"),
    [
        pytest.param("r = Relu(h) y = ConvTranspose(r, turned)", IMAGE, id="ConvTranspose"),
        # What lies beside them keeps its size.
        pytest.param("k = Concat <axis = 1> (h, x) y = Conv(k, w10)", IMAGE, id="Conv of these and other channels"),
        pytest.param(f"{POOLED} y = Gemm(f, matrix)", MATRIX, id="Gemm"),
        pytest.param(f"{POOLED} y = Gemm <transB = 1> (f, matrix_t)", MATRIX, id="Gemm with transB"),
        pytest.param("f = Flatten(h) y = MatMul(f, flat)", MATRIX, id="a column for each position"),
        pytest.param("r = Relu(h) f = Reshape(r, to) y = MatMul(f, flat)", MATRIX, id="a Reshape as Flatten"),
    ],
)
def test_the_operator_behind_takes_the_factors_out_again(behind: str, out: str) -> None:
    model = chain(behind, out)
    assert_same(model, cross_layer.write_scales(model, {H: np.geomspace(0.25, 4, 6).astype(F)}), rtol=2e-5)


@pytest.mark.parametrize(
    ("step", "free"),
    [
        ("r = Relu(h)", True),
        ("r = LeakyRelu(h)", True),
        ("r = Clip(h, low)", True),
        # Weights alone say too little: without an activation, and where tensors are joined.
        ("r = MaxPool <kernel_shape = [2,2]> (h)", False),
        ("p = Relu(h) r = Add(h, p)", False),
        ("p = Relu(h) r = Concat <axis = 1> (p)", False),
    ],
)
def test_weights_decide_in_a_chain_with_an_activation(step: str, free: bool) -> None:
    model = row(step)
    factors = cross_layer.compute_factors(model)
    assert set(factors) == ({H} if free else set())  # d has no activation behind it
    if free:
        result = cross_layer.write_scales(model, factors)
        rows = np.abs(constant(result, "h/Conv", 1)).max(axis=(1, 2, 3))
        columns = np.abs(constant(result, "d/Conv", 1)).max(axis=(0, 2, 3))
        np.testing.assert_allclose(rows / columns, rows[0] / columns[0], rtol=1e-5)
        assert np.prod(factors[H].astype(float)) == pytest.approx(1.0, rel=1e-4)
        assert_same(model, result, rtol=2e-5)


def test_dead_channels_keep_their_size() -> None:
    silent, unread = uneven(6, 4, 3, 3), uneven(6, 6, 3, 3)
    silent[1], unread[:, 3] = 0, 0
    behind = "r = Relu(h) d = Conv <kernel_shape = [3,3]> (r, v) y = Conv (d, u, c)"
    factors = cross_layer.compute_factors(chain(behind, w=silent, v=unread))[H]
    assert factors[[1, 3]].tolist() == [1.0, 1.0]
    assert not (factors[[0, 2, 4, 5]] == 1).any()
    by_values = equalize_values(np.array([1.0, 16.0, 0.0, np.inf]), np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(by_values, [2.0, 0.5, 1.0, 1.0])


CONV = "y = Conv(r, u)"
STAYING = {
    "Sigmoid": (f"r = Sigmoid(h) {CONV}",),
    "Clip with an upper bound": (f"r = Clip(h, low, six) {CONV}",),
    "Clip from above 0": (f"r = Clip(h, six) {CONV}",),
    "another reader": (f"r = Relu(h) z = Sigmoid(r) {CONV}",),
    "Add of a constant": (f"r = Add(h, slope) {CONV}",),
    "Add of a number": (f"r = Add(h, six) {CONV}",),
    "Add of another number of channels": (f"g = GlobalAveragePool(x) k = Conv(g, w1) r = Add(h, k) {CONV}",),
    "Add of a tensor without factors": (f"k = Sigmoid(h) r = Add(h, k) {CONV}",),
    "square": (f"r = Mul(h, h) {CONV}",),
    "reciprocal": (f"{GATE} r = Div(o, h) {CONV}",),
    "padded with a number": (f"r = Pad(h, amounts, six) {CONV}",),
    "other axis": (f"t = Transpose <perm = [0,1,3,2]> (h) r = Relu(t) {CONV}",),
    "joined along another axis": (f"k = Relu(h) r = Concat <axis = 2> (h, k) {CONV}",),
    "grouped transposed convolution": ("r = Relu(h) y = ConvTranspose <group = 6> (r, turned6)",),
    "turned Gemm": (f"{POOLED} y = Gemm <transA = 1> (f, matrix)", MATRIX),
    "a Reshape that mixes channels": ("r = Relu(h) f = Reshape(r, mixed) y = MatMul(f, matrix)", MATRIX),
    "multiplied by nobody": ("y = Relu(h)",),
}


@pytest.mark.parametrize("name", sorted(STAYING))
def test_what_does_not_commute_stays(name: str) -> None:
    model = chain(*STAYING[name])
    assert H not in cross_layer.compute_factors(model)
    with pytest.raises(PlanError, match=r"cannot take the factors|has no channels"):
        cross_layer.write_scales(model, {H: np.full(6, 2, F)})


def test_outputs_shared_weights_captured_tensors_and_unknown_shapes_stay() -> None:
    head = "g (float[N,6,8,8] x) => (float[N,6,8,8] y"
    lines = "h = Conv (x, w) r = Relu(h) y = Conv (r, v)"
    weights = {"w": uneven(6, 6, 1, 1), "v": uneven(6, 6, 1, 1, seed=1)}
    bare = parse(f"{head}) {{ {lines} }}", **weights)
    free = infer_shapes(bare)
    assert cross_layer.compute_factors(free)
    assert not cross_layer.compute_factors(free, fixed=[TensorId("r")])
    assert not cross_layer.compute_factors(bare)
    seen = infer_shapes(parse(f"{head}, float[N,6,8,8] r) {{ {lines} }}", **weights))
    assert not cross_layer.compute_factors(seen)
    shared = infer_shapes(parse(f"{head}) {{ {lines.replace('(r, v)', '(r, w)')} }}", **weights))
    assert not cross_layer.compute_factors(shared)
    inner = infer_shapes(in_branch(free))
    assert set(cross_layer.compute_factors(inner)) == {TensorId("h", "branch.then_branch")}


def joined() -> ModelProto:
    text = """g (float[N,4,8,8] x) => (float[N,5] y) {
        a = Conv (x, w0) b = Conv (a, w1) s = Add(a, b) r = Relu(s) c = Conv(r, w2)
        k = Concat <axis = 1> (r, c) m = GlobalAveragePool(k) f = Flatten(m) y = Gemm <transB = 1> (f, w3, b3) }"""
    shapes = {"w0": (6, 4), "w1": (6, 6), "w2": (3, 6)}
    held = {name: uneven(*shape, 1, 1, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    return infer_shapes(parse(text, **held, w3=uneven(5, 9), b3=uneven(5)))


# Channels of those tensors that have not six.
SIZES = {"c": 3, "k": 9, "m": 9, "f": 9}


def test_values_decide_behind_add_and_concat() -> None:
    model = joined()
    axes = cross_layer.list_channel_axes(model)
    assert axes == dict.fromkeys(map(TensorId, "abscrkmf"), 1)
    assert not cross_layer.compute_factors(model)  # nothing is known without values
    rng = np.random.default_rng(0)
    largest = {t: 10 ** rng.uniform(-2, 2, SIZES.get(t.name, 6)) for t in axes}
    factors = cross_layer.compute_factors(model, largest)
    np.testing.assert_array_equal(factors[TensorId("a")], factors[TensorId("b")])
    assert_same(model, cross_layer.write_scales(model, factors), rtol=5e-5)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    model = joined()
    for name, factors in (("a", np.ones(5, F) * 2), ("nobody", np.ones(6, F) * 2)):
        with pytest.raises(PlanError, match="no channels"):
            cross_layer.write_scales(model, {TensorId(name): factors})
    with pytest.raises(PlanError, match="cannot take"):
        cross_layer.write_scales(model, {TensorId("a"): np.full(6, 2, F), TensorId("b"): np.full(6, 3, F)})


def test_float16_weights_that_would_overflow_are_refused() -> None:
    text = "g (float16[N,2,4,4] x) => (float16[N,2,4,4] y) { h = Conv (x, w) r = Relu(h) y = Conv (r, v) }"
    held = {name: np.full((2, 2, 1, 1), 60000, np.float16) for name in "wv"}
    with pytest.raises(PlanError, match="overflow float16"):
        cross_layer.write_scales(infer_shapes(parse(text, **held)), {TensorId("h"): np.array([2.0, 1.0], F)})


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
    axes = cross_layer.list_shift_axes(RESIDUAL)
    assert {tensor.name for tensor in axes} == {"a", "c", "d"}
    seen = values(RESIDUAL, *(tensor.name for tensor in axes))
    chosen = cross_layer.choose_shifts(RESIDUAL, {t: statistics(seen[t.name]) for t in axes})
    assert TensorId("a") in chosen
    made = cross_layer.write_shifts(RESIDUAL, chosen)
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
    c = cross_layer.compute_shifts(low, high)
    before, after = max(high.max(), 0) - min(low.min(), 0), max((high - c).max(), 0) - min((low - c).min(), 0)
    assert after <= before + 1e-5


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_alone(why: str) -> None:
    body, weights = LEFT[why]
    assert cross_layer.list_shift_axes(network(body, **weights)) == {}


def test_gemm_and_matmul_take_it() -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 5), "b": (5,), "v": (5, 4), "c": (4,)}
    text = """g (float[N,8,6,6] x) => (float[N,6,6,4] y) {
        t = Transpose<perm=[0,2,3,1]>(x) m = MatMul(t, w) a = Add(m, b) n = MatMul(a, v) y = Add(n, c) }"""
    weights = {name: rng.standard_normal(shape).astype(F) for name, shape in shapes.items()}
    proto = infer_shapes(parse(text, **weights))
    assert cross_layer.list_shift_axes(proto) == {TensorId("a"): -1}
    made = cross_layer.write_shifts(proto, {TensorId("a"): np.arange(5, dtype=F)})
    assert np.allclose(values(made, "a")["a"], values(proto, "a")["a"] - np.arange(5), atol=1e-5)
    assert np.allclose(values(made)["y"], values(proto)["y"], atol=1e-4)


def test_a_tensor_that_cannot_be_lowered_is_an_error() -> None:
    for name, channels in (("b", 8), ("a", 7)):
        with pytest.raises(PlanError, match="cannot take the shifts"):
            cross_layer.write_shifts(RESIDUAL, {TensorId(name): np.ones(channels, F)})


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
