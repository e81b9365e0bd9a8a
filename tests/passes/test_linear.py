"""Linear operators as passes see them: weight, channels, bias, and the affine maps in front of and behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.graph import infer_shapes
from onnxq.passes.linear import ARITHMETIC, Linear, find_linear, find_scalar_source, list_followers
from onnxq.passes.view import View
from tests.passes.kit import infer, parse

CONV, DEEP = "(float[1,4,5,5] x) => (float[1,o,h,w] y)", "(float[1,4,5,5] x, float[6,4,1,1] w) => (float[1,o,h,w] y)"
ROW, CUBE = "(float[3,4] x) => (float[3,n] y)", "(float[2,3,4] x) => (float[2,3,n] y)"
RNG = np.random.default_rng(3)


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def model(head: str, nodes: str, **arrays: Any) -> onnx.ModelProto:
    return infer_shapes(parse(f"g {head} {{ {nodes} }}", **arrays))


def linear(proto: onnx.ModelProto, op_type: str = "") -> tuple[View, Linear | None]:
    """The first operator of a type (the first node at all, without one) as a linear one."""
    view = View(proto)
    node = next(node for node in view.index.nodes if op_type in ("", node.op_type))
    return view, find_linear(view, node)


@pytest.mark.parametrize(
    ("head", "nodes", "arrays", "seen"),
    [
        # seen: axis, groups, channels, channel axis, rank, last node, input with the bias.
        pytest.param(CONV, "y = Conv(x, w, b)", {"w": array(6, 4, 3, 3), "b": array(6)}, (0, 1, 6, 1, 4, "Conv", 2),
                     id="Conv"),
        pytest.param(CONV, "y = Conv<group=2>(x, w)", {"w": array(6, 2, 3, 3)}, (0, 1, 6, 1, 4, "Conv", 2),
                     id="a grouped Conv: all output channels"),
        pytest.param(CONV, "y = ConvTranspose<group=2>(x, w)", {"w": array(4, 3, 2, 2)},
                     (1, 2, 6, 1, 4, "ConvTranspose", 2), id="a grouped ConvTranspose: those of one group"),
        pytest.param(ROW, "y = Gemm(x, w, b)", {"w": array(4, 7), "b": array(7)}, (1, 1, 7, 1, 2, "Gemm", 2),
                     id="Gemm"),
        pytest.param(ROW, "y = Gemm<transB=1>(x, w)", {"w": array(7, 4)}, (0, 1, 7, 1, 2, "Gemm", 2),
                     id="Gemm with transB"),
        pytest.param(ROW, "y = MatMul(x, w)", {"w": array(4, 7)}, (1, 1, 7, -1, 2, "MatMul", None), id="MatMul"),
        pytest.param(CUBE, "m = MatMul(x, w) y = Add(m, b)", {"w": array(4, 7), "b": array(7)},
                     (1, 1, 7, -1, 3, "Add", 1), id="MatMul and Add"),
        pytest.param(CUBE, "m = MatMul(x, w) y = Add(b, m)", {"w": array(4, 7), "b": array(1, 1, 7)},
                     (1, 1, 7, -1, 3, "Add", 0), id="Add and MatMul, and a bias of more axes"),
        pytest.param(CUBE, "m = MatMul(x, w) y = Add(m, b)", {"w": array(4, 7), "b": array(3, 7)},
                     (1, 1, 7, -1, 3, "MatMul", None), id="an Add of one value for each position is no bias"),
        pytest.param(CUBE, "m = MatMul(x, w) e = Relu(m) a = Add(m, b) y = Add(a, e)",
                     {"w": array(4, 7), "b": array(7)}, (1, 1, 7, -1, 3, "MatMul", None), id="a second reader"),
    ],
)  # fmt: skip
def test_a_linear_operator_is_seen_with_its_axes_and_its_bias(head, nodes, arrays, seen):
    _, op = linear(model(head, nodes, **arrays))
    assert op is not None
    at = None if op.bias_at is None else op.bias_at[1]
    assert (op.axis, op.groups, op.channels, op.channel_axis, op.rank, op.last.op_type, at) == seen
    assert op.rank_known
    np.testing.assert_array_equal(op.weight, arrays["w"])
    # A bias that is there is read, one that could be there is 0.
    if at is not None and "b" in arrays:
        np.testing.assert_array_equal(op.bias, arrays["b"].reshape(-1))
    else:
        assert not op.bias.any()


def test_the_bias_of_a_gemm_is_scaled_by_beta_and_may_be_a_scalar():
    bias = array(7)
    _, op = linear(model(ROW, "y = Gemm<beta=0.5>(x, w, b)", w=array(4, 7), b=bias))
    assert op is not None
    np.testing.assert_allclose(op.bias, bias * 0.5)
    _, op = linear(model(ROW, "y = Gemm(x, w, b)", w=array(4, 7), b=3.0))
    assert op is not None
    np.testing.assert_array_equal(np.broadcast_to(op.bias, 7), np.full(7, 3.0))


@pytest.mark.parametrize(
    ("head", "nodes", "arrays"),
    [
        pytest.param(DEEP, "y = Conv(x, w)", {}, id="a weight computed at run time"),
        pytest.param(CONV, "c = ReduceMax<axes=[0,2,3],keepdims=0>(x) y = Conv(x, w, c)", {"w": array(4, 4, 1, 1)},
                     id="a bias computed at run time"),
        pytest.param(ROW, "y = Gemm(x, w, b)", {"w": array(4, 7), "b": array(3, 7)}, id="a C that differs by row"),
        pytest.param("(float[2,3,4] x) => (float[2,3,5] y)", "y = MatMul(x, w)", {"w": array(2, 4, 5)},
                     id="a stack of matrices"),
        pytest.param("(float[4] x) => (float y)", "y = MatMul(x, w)", {"w": array(4)}, id="a vector"),
        pytest.param(ROW, "y = MatMul(v, w)", {"v": array(3, 4), "w": array(4, 7)}, id="two constants"),
        pytest.param(ROW, "y = Relu(x)", {}, id="another operator"),
        pytest.param("(int32[3,4] x) => (int32[3,7] y)", "y = MatMul(x, w)", {"w": np.ones((4, 7), np.int32)},
                     id="integers"),
    ],
)  # fmt: skip
def test_other_nodes_are_no_linear_operators(head, nodes, arrays):
    proto = model(head, nodes, **arrays)
    view = View(proto)
    assert find_linear(view, next(node for node in view.index.nodes if node.result.name == "y")) is None


@pytest.mark.parametrize(
    ("nodes", "owns"),
    [
        pytest.param("y = Conv(x, w, b)", True, id="alone"),
        pytest.param("c = Conv(x, w, b) d = Conv(c, w, v) y = Relu(d)", False, id="the weight is shared"),
        pytest.param("c = Conv(x, w, b) d = Conv(c, v, b) y = Relu(d)", False, id="the bias is shared"),
        pytest.param("y = Conv(x, w)", True, id="no bias yet"),
    ],
)
def test_constants_are_owned_where_nobody_else_reads_them(nodes, owns):
    weight = array(4, 4, 1, 1)
    arrays = {"w": weight, "b": array(4), "v": weight.reshape(4, 4, 1, 1) if "Conv(c, v, b)" in nodes else array(4)}
    view, op = linear(model(CONV, nodes, **arrays))
    assert op is not None
    assert op.owns_constants(view) == owns


NORM = "BatchNormalization(c, s, t, m, v)"
STATS = {"s": array(6), "t": array(6), "m": array(6), "v": np.abs(array(6)) + 0.5}
WEIGHT = {"w": array(6, 4, 1, 1)}


@pytest.mark.parametrize(
    ("nodes", "arrays", "count"),
    [
        pytest.param("y = Mul(c, k)", {"k": 2.0}, 1, id="a scalar factor"),
        pytest.param("y = Mul(k, c)", {"k": array(6, 1, 1)}, 1, id="a factor for each channel, first"),
        pytest.param("y = Mul(c, k)", {"k": array(1, 6, 5, 5)}, 0, id="a factor for each value"),
        pytest.param("y = Mul(c, k)", {"k": array(5)}, 0, id="a factor for each column"),
        pytest.param("y = Div(c, k)", {"k": 4.0}, 1, id="divided"),
        pytest.param("y = Div(k, c)", {"k": 4.0}, 0, id="a reciprocal"),
        pytest.param("y = Div(c, k)", {"k": 0.0}, 0, id="divided by 0"),
        pytest.param("y = Sub(c, k)", {"k": array(6, 1, 1)}, 1, id="a shift"),
        pytest.param("y = Sub(k, c)", {"k": array(6, 1, 1)}, 1, id="a shift of the negative"),
        pytest.param(f"y = {NORM}", STATS, 1, id="BatchNormalization"),
        pytest.param(f"n = {NORM} a = Mul(n, k) b = Add(a, k) y = Sub(k, b)", {**STATS, "k": array(6, 1, 1)}, 4,
                     id="all of them, one behind another"),
        pytest.param("a = Mul(c, k) r = Relu(a) y = Add(r, k)", {"k": 2.0}, 1, id="up to another operator"),
        pytest.param("a = Mul(c, k) e = Relu(a) y = Add(a, e)", {"k": 2.0}, 1, id="up to a second reader"),
        pytest.param("y = Mul(c, c)", {}, 0, id="a square"),
    ],
)  # fmt: skip
def test_the_affine_map_behind_a_convolution_is_what_its_nodes_compute(nodes, arrays, count):
    proto = model(CONV, f"c = Conv(x, w) {nodes}", **WEIGHT, **arrays)
    view, op = linear(proto)
    assert op is not None
    found = list_followers(view, op, ARITHMETIC | {"BatchNormalization"})
    assert len(found.nodes) == count
    if count:
        x = array(1, 4, 5, 5)
        probed = onnx.ModelProto()
        probed.CopyFrom(proto)
        del probed.graph.output[:]
        last = found.nodes[-1].result.name
        probed.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in ("c", last))
        before, after = infer(probed, {"x": x})
        a, c = (np.broadcast_to(value, 6).reshape(6, 1, 1) for value in (found.a, found.c))
        np.testing.assert_allclose(a * before + c, after, rtol=1e-5, atol=1e-5)


def test_kinds_that_are_not_asked_for_end_the_map():
    view, op = linear(model(CONV, "c = Conv(x, w) a = Mul(c, k) y = Add(a, k)", **WEIGHT, k=2.0))
    assert op is not None
    assert [node.op_type for node in list_followers(view, op, frozenset({"Mul"})).nodes] == ["Mul"]
    assert list_followers(view, op, frozenset({"Add"})).nodes == ()


@pytest.mark.parametrize(
    ("norm", "arrays"),
    [
        pytest.param("BatchNormalization<training_mode=1>(c, s, t, m, v)", STATS, id="training"),
        pytest.param("BatchNormalization(k, s, t, m, c1)", {**STATS, "k": array(1, 6, 5, 5)}, id="c is its variance"),
    ],
)
def test_a_norm_that_is_no_affine_map_ends_it(norm, arrays):
    squeezed = "c1 = ReduceMax<axes=[0,2,3],keepdims=0>(c)" if "c1" in norm else ""
    outputs = "y, m2, v2" if "training" in norm else "y"
    view, op = linear(model(CONV, f"c = Conv(x, w) {squeezed} {outputs} = {norm}", **WEIGHT, **arrays))
    assert op is not None
    assert list_followers(view, op, frozenset({"BatchNormalization"})).nodes == ()


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        # A shift of 0 needs no place to go.
        pytest.param("m = MatMul(x, w) y = Mul(m, k)", ["Mul"], id="a factor"),
        pytest.param("m = MatMul(x, w) a = Mul(m, k) y = Sub(a, k)", ["Mul"], id="up to the shift"),
        pytest.param("m = MatMul(x, w) a = Add(m, k) y = Sub(a, k)", ["Sub"], id="behind its Add it takes shifts"),
    ],
)
def test_a_bare_matmul_has_nowhere_to_put_a_shift(nodes, kinds):
    view, op = linear(model(CUBE, nodes, w=array(4, 7), k=array(7)))
    assert op is not None
    assert [node.op_type for node in list_followers(view, op, ARITHMETIC).nodes] == kinds


@pytest.mark.parametrize(
    ("nodes", "arrays", "s", "t", "count"),
    [
        pytest.param("a = Mul(x, k)", {"k": 2.0}, 2.0, 0.0, 1, id="Mul"),
        pytest.param("a = Sub(x, k)", {"k": 2.0}, 1.0, -2.0, 1, id="Sub"),
        pytest.param("a = Sub(k, x)", {"k": 2.0}, -1.0, 2.0, 1, id="Sub from a constant"),
        pytest.param("a = Div(x, k)", {"k": 4.0}, 0.25, 0.0, 1, id="Div"),
        pytest.param("m = Sub(x, k) a = Div(m, l)", {"k": 0.5, "l": 0.25}, 4.0, -2.0, 2, id="as images are normalized"),
        pytest.param(
            "m = Mul(x, k) n = Add(m, l) a = Mul(k, n)", {"k": 2.0, "l": 1.0}, 4.0, 2.0, 3, id="three of them"
        ),
        pytest.param("r = Relu(x) a = Mul(r, k)", {"k": 2.0}, 2.0, 0.0, 1, id="as far back as it goes"),
    ],
)
def test_scalar_arithmetic_in_front_is_one_affine_map(nodes, arrays, s, t, count):
    view, op = linear(model(CONV, f"{nodes} y = Conv(a, w)", **WEIGHT, **arrays), "Conv")
    assert op is not None
    source = find_scalar_source(view, op)
    assert source is not None
    assert (source.s, source.t, len(source.nodes)) == (s, t, count)
    assert source.x.name == ("r" if "Relu" in nodes else "x")
    # In their order, so that all can be removed.
    assert source.nodes[-1].result.name == "a"


@pytest.mark.parametrize(
    ("nodes", "arrays"),
    [
        pytest.param("a = Mul(x, k)", {"k": array(4, 1, 1)}, id="a factor for each channel"),
        pytest.param("a = Div(k, x)", {"k": 2.0}, id="a reciprocal"),
        pytest.param("a = Div(x, k)", {"k": 0.0}, id="divided by 0"),
        pytest.param("a = Mul(x, k)", {"k": float("inf")}, id="not finite"),
        pytest.param("a = Relu(x)", {}, id="another operator"),
        pytest.param("a = Mul(x, x)", {}, id="a square"),
    ],
)
def test_no_scalar_arithmetic_in_front(nodes, arrays):
    view, op = linear(model(CONV, f"{nodes} y = Conv(a, w)", **WEIGHT, **arrays), "Conv")
    assert op is not None
    assert find_scalar_source(view, op) is None


def test_arithmetic_that_others_read_too_is_no_source():
    nodes = "a = Mul(x, k) c = Conv(a, w) y = Add(c, a)"
    view, op = linear(model(CONV, nodes, w=array(4, 4, 1, 1), k=2.0), "Conv")
    assert op is not None
    assert find_scalar_source(view, op) is None


def test_a_constant_of_more_axes_than_x_is_no_scalar():
    # Its result has three axes, x two.
    view, op = linear(model("(float[3,4] x) => (float[1,3,n] y)", "a = Mul(x, k) y = MatMul(a, w)",
                            w=array(4, 7), k=np.full((1, 1, 1), 2, np.float32)), "MatMul")  # fmt: skip
    assert op is not None
    assert find_scalar_source(view, op) is None
