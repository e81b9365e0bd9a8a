"""Ends and rows of channels over samples, against the same read off the whole array."""

from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.passes.equalization.passes import observe_channels
from onnxq.progress import silent
from onnxq.sites import TensorId
from tests.passes.kit import in_branch, parse

A, B = TensorId("a"), TensorId("b")
MODEL = infer_shapes(
    parse("g (float[N,3,4] x) => (float[N,3,4] y) { a = Mul(x, two) b = Relu(a) y = Neg(b) }", two=2.0)
)


def dataset(x: np.ndarray, proto: onnx.ModelProto = MODEL, **more: Any) -> Dataset:
    return load_data({"x": x, **more}, GraphIndex(proto).inputs, DataConfig())


def observe(channels: dict[TensorId, int], samples: Dataset, proto: onnx.ModelProto = MODEL, **options: Any) -> Any:
    return observe_channels(proto, channels, samples, progress=silent, title="", **options)


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
    found = observe({A: -1}, dataset(x), rows=rows, batch=1)
    held = found[A].rows
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
