"""Channels are scaled where the factors cancel, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq.errors import PlanError
from onnxq.graph import infer_shapes
from onnxq.passes.equalization.cross_layer import compute_factors, list_channel_axes, write_scales
from onnxq.passes.equalization.operators import find_scaled_channels
from onnxq.passes.view import View
from onnxq.sites import TensorId
from tests.passes.kit import assert_same, constant, in_branch, parse

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
    "amounts": np.asarray([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
}


def row(step: str, groups: int = 1, seed: int = 0) -> ModelProto:
    """Conv, `step` from h to r, Conv: 6 channels between."""
    text = f"""g (float[N,4,8,8] x) => (float[N,5,Y,X] y) {{
        h = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w, b) {step}
        d = Conv <kernel_shape = [3,3], group = {groups}> (r, v) y = Conv (d, u, c) }}"""
    held = {"w": uneven(6, 4, 3, 3, seed=seed), "b": uneven(6, seed=seed + 1), "v": uneven(6, 6 // groups, 3, 3)}
    return infer_shapes(parse(text, **held, u=uneven(5, 6, 1, 1), c=uneven(5), **EXTRA))


PASSING = {
    "nothing": "r = Identity(h)",
    "Relu": "r = Relu(h)",
    "LeakyRelu": "r = LeakyRelu <alpha = 0.2> (h)",
    "PRelu": "r = PRelu(h, slope)",
    "Clip from 0": "r = Clip(h, low)",
    "MaxPool": "p = Relu(h) r = MaxPool <kernel_shape = [2,2]> (p)",
    "AveragePool": "r = AveragePool <kernel_shape = [2,2]> (h)",
    "Pad": 'r = Pad <mode = "edge"> (h, amounts)',
    "gate": "q = GlobalAveragePool(x) p = Sigmoid(q) o = ReduceMax(p) r = Mul(o, h)",
    "twice": "r = Add(h, h)",
    "constant factor": "r = Mul(h, slope)",
}


@pytest.mark.parametrize("name", sorted(PASSING))
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_function_stays_and_channels_become_alike(name: str, groups: int) -> None:
    model = row(PASSING[name], groups)
    found = find_scaled_channels(View(model))
    assert found.free[:6].all(), name
    factors = {TensorId("h"): np.geomspace(0.25, 4, 6).astype(F)}
    result = write_scales(model, factors)
    np.testing.assert_allclose(
        constant(result, "h/Conv", 1), constant(model, "h/Conv", 1) * factors[TensorId("h")].reshape(6, 1, 1, 1)
    )
    assert_same(model, result, rtol=2e-5)


def test_weights_decide_in_a_chain() -> None:
    model = row(PASSING["Relu"])
    factors = compute_factors(model)
    assert set(factors) == {TensorId("h")}  # d has no activation behind it: weights alone say too little there
    result = write_scales(model, factors)
    rows = np.abs(constant(result, "h/Conv", 1)).max(axis=(1, 2, 3))
    columns = np.abs(constant(result, "d/Conv", 1)).max(axis=(0, 2, 3))
    np.testing.assert_allclose(rows / columns, rows[0] / columns[0], rtol=1e-5)
    assert np.prod(factors[TensorId("h")].astype(float)) == pytest.approx(1.0, rel=1e-4)
    assert_same(model, result, rtol=2e-5)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(["Relu", "LeakyRelu", "nothing"]), st.sampled_from([1, 2, 3, 6]))
def test_any_factors_leave_the_function(seed: int, name: str, groups: int) -> None:
    model = row(PASSING[name], groups, seed)
    rng = np.random.default_rng(seed)
    factors = {TensorId(t): np.exp(rng.uniform(-3, 3, 6)).astype(F) for t in ("h", "d")}
    result = write_scales(model, factors)
    assert_same(model, result, rtol=1e-4, seed=seed)


STAYING = {
    "Sigmoid": "r = Sigmoid(h)",
    "Clip with an upper bound": "r = Clip(h, low, six)",
    "Clip from above 0": "r = Clip(h, six)",
    "another reader": "r = Relu(h) z = Sigmoid(r)",
    "Add of a constant": "r = Add(h, slope)",
    "square": "r = Mul(h, h)",
    "padded with a number": "r = Pad(h, amounts, six)",
    "other axis": "t = Transpose <perm = [0,1,3,2]> (h) r = Relu(t)",
}


@pytest.mark.parametrize("name", sorted(STAYING))
def test_what_does_not_commute_stays(name: str) -> None:
    model = row(STAYING[name])
    found = find_scaled_channels(View(model))
    assert not found.free[:6].any()
    with pytest.raises(PlanError, match="cannot take the factors"):
        write_scales(model, {TensorId("h"): np.full(6, 2, F)})


def test_outputs_shared_weights_and_captured_tensors_stay() -> None:
    head = "g (float[N,6,8,8] x) => (float[N,6,8,8] y"
    lines = "h = Conv (x, w) r = Relu(h) y = Conv (r, v)"
    weights = {"w": uneven(6, 6, 1, 1), "v": uneven(6, 6, 1, 1, seed=1)}
    free = infer_shapes(parse(f"{head}) {{ {lines} }}", **weights))
    assert compute_factors(free)
    seen = infer_shapes(parse(f"{head}, float[N,6,8,8] r) {{ {lines} }}", **weights))
    assert not compute_factors(seen)
    shared = infer_shapes(parse(f"{head}) {{ {lines.replace('(r, v)', '(r, w)')} }}", **weights))
    assert not compute_factors(shared)
    inner = infer_shapes(in_branch(free))
    assert set(compute_factors(inner)) == {TensorId("h", "branch.then_branch")}


def joined() -> ModelProto:
    text = """g (float[N,4,8,8] x) => (float[N,5] y) {
        a = Conv (x, w0) b = Conv (a, w1) s = Add(a, b) r = Relu(s) c = Conv(r, w2)
        k = Concat <axis = 1> (r, c) m = GlobalAveragePool(k) f = Flatten(m) y = Gemm <transB = 1> (f, w3, b3) }"""
    shapes = {"w0": (6, 4), "w1": (6, 6), "w2": (3, 6)}
    held = {name: uneven(*shape, 1, 1, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    return infer_shapes(parse(text, **held, w3=uneven(5, 9), b3=uneven(5)))


def test_values_decide_behind_add_and_concat() -> None:
    model = joined()
    axes = list_channel_axes(model)
    assert axes == dict.fromkeys(map(TensorId, "abscrkmf"), 1)
    assert not compute_factors(model)  # nothing is known without values
    rng = np.random.default_rng(0)
    sizes = {"c": 3, "k": 9, "m": 9, "f": 9}
    largest = {t: 10 ** rng.uniform(-2, 2, sizes.get(t.name, 6)) for t in axes}
    factors = compute_factors(model, largest)
    np.testing.assert_array_equal(factors[TensorId("a")], factors[TensorId("b")])
    result = write_scales(model, factors)
    assert_same(model, result, rtol=5e-5)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    model = joined()
    with pytest.raises(PlanError, match="no channels"):
        write_scales(model, {TensorId("a"): np.ones(5, F) * 2})
    with pytest.raises(PlanError, match="no channels"):
        write_scales(model, {TensorId("nobody"): np.ones(6, F) * 2})
    with pytest.raises(PlanError, match="cannot take"):
        write_scales(model, {TensorId("a"): np.full(6, 2, F), TensorId("b"): np.full(6, 3, F)})


def test_float16_weights_that_would_overflow_are_refused() -> None:
    text = "g (float16[N,2,4,4] x) => (float16[N,2,4,4] y) { h = Conv (x, w) r = Relu(h) y = Conv (r, v) }"
    held = {name: np.full((2, 2, 1, 1), 60000, np.float16) for name in "wv"}
    with pytest.raises(PlanError, match="overflow float16"):
        write_scales(infer_shapes(parse(text, **held)), {TensorId("h"): np.array([2.0, 1.0], F)})
