"""Labels of channels: how they travel from one linear operator to the next, and what holds them fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxq.graph import infer_shapes
from onnxq.passes.equalization.channels import ScaledChannels
from onnxq.passes.equalization.operators import find_scaled_channels
from onnxq.passes.view import View
from onnxq.sites import TensorId
from tests.passes.kit import parse

HEAD = "(float[N,4,6,6] x) => (float[N,o,h,w] y)"


def weight(*shape: int) -> np.ndarray:
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.float32).reshape(shape)


def channels(nodes: str, head: str = HEAD, *, shapes: bool = True, **arrays: Any) -> ScaledChannels:
    held = {"w": weight(3, 4, 1, 1), "v": weight(2, 3, 1, 1), **arrays}
    proto = parse(f"g {head} {{ {nodes} }}", **held)
    return find_scaled_channels(View(infer_shapes(proto) if shapes else proto))


def roots(found: ScaledChannels, tensor: str) -> list[int]:
    """The factors of a tensor's channels, by number."""
    return [int(k) for k in found.root[found.labels[TensorId(tensor)]]]


def test_a_chain_has_a_factor_for_each_channel_between_two_operators():
    found = channels("h = Conv(x, w) r = Relu(h) y = Conv(r, v)")
    first, second = found.ops
    assert roots(found, "h") == roots(found, "r") == [0, 1, 2]
    np.testing.assert_array_equal(first.rows, [0, 1, 2])
    assert first.columns is None
    np.testing.assert_array_equal(second.columns, [0, 1, 2])
    np.testing.assert_array_equal(second.rows, [3, 4])
    # The output of the network keeps its size.
    assert found.free.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("second", "arrays", "shape"),
    [
        # |W| as [groups, outputs, inputs].
        pytest.param("Conv(r, v)", {}, (1, 2, 3), id="Conv"),
        pytest.param("Conv<group=3>(r, u)", {"u": weight(6, 1, 3, 3)}, (3, 2, 1), id="a depthwise Conv"),
        pytest.param("ConvTranspose(r, u)", {"u": weight(3, 5, 2, 2)}, (1, 5, 3), id="ConvTranspose"),
    ],
)
def test_weights_are_seen_as_groups_of_outputs_and_inputs(second, arrays, shape):
    found = channels(f"h = Conv(x, w) r = Relu(h) y = {second}", **arrays)
    op = found.ops[1]
    assert op.inputs == 3
    assert op.largest.shape == shape
    assert found.free[:3].all()


def test_a_grouped_transposed_convolution_takes_no_factors():
    found = channels("h = Conv(x, w) r = Relu(h) y = ConvTranspose<group=3>(r, u)", u=weight(3, 1, 2, 2))
    assert len(found.ops) == 1
    assert not found.free.any()


def test_a_gemm_reads_them_with_transb_and_without():
    flat = "p = GlobalAveragePool(r) f = Flatten(p)"
    for line, held in (("Gemm(f, u)", weight(3, 5)), ("Gemm<transB=1>(f, u)", weight(5, 3))):
        found = channels(
            f"h = Conv(x, w) r = Relu(h) {flat} y = {line}", "(float[N,4,6,6] x) => (float[N,5] y)", u=held
        )
        assert found.free[:3].all()
        assert found.ops[1].largest.shape == (1, 5, 3)
    turned = channels(f"h = Conv(x, w) r = Relu(h) {flat} y = Gemm<transA=1>(f, u)",
                      "(float[3,4,6,6] x) => (float[3,5] y)", u=weight(3, 5))  # fmt: skip
    assert not turned.free.any()


@pytest.mark.parametrize("flat", ["Flatten(r)", "Reshape(r, to)"])
def test_behind_a_flatten_a_channel_has_a_column_for_each_position(flat):
    found = channels(
        f"h = Conv(x, w) r = Relu(h) f = {flat} y = MatMul(f, u)", "(float[2,4,2,2] x) => (float[2,5] y)",
        u=weight(12, 5), to=np.array([2, 12], np.int64),
    )  # fmt: skip
    assert roots(found, "f") == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert found.free[:3].all()


def test_a_reshape_that_mixes_channels_holds_them():
    found = channels(
        "h = Conv(x, w) r = Relu(h) f = Reshape(r, to) y = MatMul(f, u)", "(float[2,4,2,2] x) => (float[n,5] y)",
        u=weight(6, 5), to=np.array([-1, 6], np.int64),
    )  # fmt: skip
    assert not found.free.any()


def test_an_add_gives_both_sides_the_same_factors():
    found = channels("a = Conv(x, w) b = Conv(x, u) s = Add(a, b) y = Conv(s, v)", u=weight(3, 4, 1, 1))
    assert roots(found, "a") == roots(found, "b") == roots(found, "s")
    assert found.free[found.labels[TensorId("b")]].all()


@pytest.mark.parametrize(
    ("nodes", "arrays"),
    [
        pytest.param("a = Conv(x, w) b = GlobalAveragePool(x) c = Conv(b, u) s = Add(a, c) y = Conv(s, v)",
                     {"u": weight(1, 4, 1, 1)}, id="of another number of channels"),
        pytest.param("a = Conv(x, w) b = Sigmoid(a) s = Add(a, b) y = Conv(s, v)", {}, id="without labels"),
        pytest.param("a = Conv(x, w) s = Add(a, k) y = Conv(s, v)", {"k": np.float32(2)}, id="a constant"),
    ],
)  # fmt: skip
def test_an_add_with_anything_else_holds_them(nodes, arrays):
    assert not channels(nodes, **arrays).free.any()


def test_a_concat_lays_labels_side_by_side():
    found = channels("a = Conv(x, w) b = Conv(x, u) c = Concat<axis=1>(a, b, x) y = Conv(c, t)",
                     u=weight(2, 4, 1, 1), t=weight(1, 9, 1, 1))  # fmt: skip
    assert roots(found, "c") == [*roots(found, "a"), *roots(found, "b"), 5, 6, 7, 8]
    # What comes from elsewhere keeps its size.
    assert found.free[found.labels[TensorId("c")]].tolist() == [True] * 5 + [False] * 4


def test_a_concat_along_another_axis_holds_them():
    found = channels("a = Conv(x, w) b = Conv(x, u) c = Concat<axis=2>(a, b) y = Conv(c, v)", u=weight(3, 4, 1, 1))
    assert not found.free.any()


def test_channels_of_one_tensor_are_one_group():
    found = channels("a = Conv(x, w) r = Relu(a) b = Conv(r, v) q = Relu(b) y = Conv(q, u)", u=weight(1, 2, 1, 1))
    first, second = found.labels[TensorId("a")], found.labels[TensorId("b")]
    assert len(set(found.group[first])) == len(set(found.group[second])) == 1
    assert found.group[first][0] != found.group[second][0]


@pytest.mark.parametrize(
    ("between", "rectified"),
    [
        pytest.param("r = Relu(h)", True, id="Relu"),
        pytest.param("r = LeakyRelu(h)", True, id="LeakyRelu"),
        pytest.param("r = Clip(h, zero)", True, id="a Clip from 0"),
        pytest.param("r = MaxPool<kernel_shape=[2,2]>(h)", False, id="no activation at all"),
        pytest.param("p = Relu(h) r = Add(h, p)", False, id="an Add in the group"),
        pytest.param("p = Relu(h) r = Concat<axis=1>(p)", False, id="a Concat in the group"),
    ],
)
def test_groups_with_an_activation_and_no_join_are_rectified(between, rectified):
    found = channels(f"h = Conv(x, w) {between} y = Conv(r, v)", zero=np.float32(0))
    assert set(found.rectified[:3].tolist()) == {rectified}


@pytest.mark.parametrize(
    ("clip", "free"),
    [
        pytest.param("Clip(h, zero)", True, id="from 0"),
        pytest.param("Clip(h, zero, most)", True, id="to the largest float32, as exporters write it"),
        pytest.param("Clip(h, least, most)", True, id="no bounds"),
        pytest.param("Clip(h, zero, six)", False, id="to 6"),
        pytest.param("Clip(h, six)", False, id="from 6"),
    ],
)
def test_a_clip_is_passed_where_its_bounds_are_0_or_none(clip, free):
    bounds = {"zero": 0.0, "six": 6.0, "most": 3.4028234e38, "least": -3.4028234e38}
    found = channels(f"h = Conv(x, w) r = {clip} y = Conv(r, v)", **bounds)
    assert found.free[:3].all() == free


def test_gates_pass_and_reciprocals_hold():
    gate = "g = GlobalAveragePool(x) k = ReduceMax<axes=[1]>(g)"
    for line, free in (("Mul(h, k)", True), ("Mul(k, h)", True), ("Div(h, k)", True), ("Div(k, h)", False)):
        found = channels(f"h = Conv(x, w) {gate} r = {line} y = Conv(r, v)")
        assert found.free[:3].all() == free, line


def test_without_shapes_nothing_is_free():
    assert not channels("h = Conv(x, w) r = Relu(h) y = Conv(r, v)", shapes=False).free.any()


def test_a_tensor_that_nobody_multiplies_again_is_not_free():
    # A factor must be taken out again by the columns of a weight.
    found = channels("h = Conv(x, w) r = Relu(h) y = Sigmoid(x)")
    assert not found.free.any()
