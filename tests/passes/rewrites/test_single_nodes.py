"""Nodes that do nothing go, and single nodes become others that engines run faster; what only looks like them stays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxq.graph import GraphIndex, name_nodes
from onnxq.passes.rewrites.single_nodes import (
    fold_pad,
    read_invariants,
    remove_dead,
    reorder_residual,
    replace_prelu,
    replace_reduce_mean,
)
from onnxq.runtime import optimize_graph
from tests.passes import kit

F = np.float32
ROWS, IMAGE = ("float[N,5] x", "float[N,5] y"), ("float[N,4,5,6] x", "float[N,4,5,6] y")
POOLED, FLAT = ("float[N,4,5,6] x", "float[N,4,1,1] y"), ("float[N,4,5,6] x", "float[N,4] y")
VALUES: dict[str, Any] = {
    "one": 1.0,
    "ones": np.ones((3, 5), F),
    "onevec": np.ones(1, F),
    "two": 2.0,
    "zero": 0.0,
    "flatzero": np.zeros((1, 1), F),
    "half": 0.5,
    "off": np.asarray(False),
    "nopads": np.zeros(4, np.int64),
    "onepad": np.array([0, 1, 0, 0]),
    "deep": np.ones((1, 1, 1), F),
    "axes": np.array([2, 3]),
    "flat": np.array([-1]),
    "ordered": np.arange(4),
    "reversed": np.arange(4)[::-1].copy(),
    "places": np.arange(4).reshape(1, 4, 1, 1),
    "gamma": np.ones(8, F),
    "same": np.full((4, 1, 1), 0.1, F),
    "steep": np.full(1, 1.5, F),
    "channels": np.array([0.1, 0.5, -0.3, 1.0], F).reshape(4, 1, 1),
    "columns": np.array([0.1, 0.5, 0.3, 1, 0.2, 0.6], F),
    "above": np.array([0.1, 0.5, 0.3, 1.1], F).reshape(4, 1, 1),
    "with0": np.array([0, 0.5, 0.3, 1], F).reshape(4, 1, 1),
}


def model(lines: str, head: str, out: str, opset: int = 17, **other: Any) -> Any:
    return kit.parse(f"g ({head}) => ({out}) {{ {lines} }}", opset=opset, **kit.read_by(lines, {**VALUES, **other}))


MEAN, LAST = "y = ReduceMean <axes = [2,3]> (x)", "y = ReduceMean <axes = [2]> (s)"
SWITCH = "s = ReduceMax <keepdims = 0> (x) on = Cast <to = 9> (s)"
NORMED = "h = Add(x, z) y = LayerNormalization(h, gamma)"
STRIDED = "f = Reshape(x, flat) h = Gather(f, places) y = Relu(h)"
RELU, LEAKY, MAX = {"Relu": 1}, {"LeakyRelu": 1}, {"Max": 1, "Mul": 1}
POOL, FLATTENED = {"GlobalAveragePool": 1}, {"GlobalAveragePool": 1, "Flatten": 1}
# By name: the rewrite, the operators that are left, nodes, inputs and outputs, and the opset.
REPLACED: dict[str, tuple[Any, ...]] = {
    "identity": (remove_dead, RELU, "h = Identity(x) y = Relu(h)", *ROWS),
    "row of identities": (remove_dead, RELU, "a = Identity(x) b = Identity(a) h = Identity(b) y = Relu(h)", *ROWS),
    "dropout": (remove_dead, RELU, "h = Dropout(x) y = Relu(h)", *ROWS),
    "dropout off": (remove_dead, RELU, "h = Dropout(x, half, off) y = Relu(h)", *ROWS),
    "times one": (remove_dead, RELU, "h = Mul(x, onevec) y = Relu(h)", *ROWS),
    "one times": (remove_dead, RELU, "h = Mul(one, x) y = Relu(h)", *ROWS),
    "over one": (remove_dead, RELU, "h = Div(x, one) y = Relu(h)", *ROWS),
    "plus zero": (remove_dead, RELU, "h = Add(flatzero, x) y = Relu(h)", *ROWS),
    "minus zero": (remove_dead, RELU, "h = Sub(x, zero) y = Relu(h)", *ROWS),
    "cast to itself": (remove_dead, RELU, "h = Cast <to = 1> (x) y = Relu(h)", *ROWS),
    "empty pad": (remove_dead, RELU, "h = Pad(x, nopads) y = Relu(h)", *ROWS),
    "gathered in order": (remove_dead, RELU, "h = Gather(x, ordered) y = Relu(h)", "float[4] x", "float[4] y"),
    "as strided": (remove_dead, RELU, STRIDED, "float[1,4,1,1] x", "float[1,4,1,1] y"),
    "read by nobody": (remove_dead, RELU, "h = Sqrt(x) i = Neg(h) y = Relu(x)", *ROWS),
    "one slope": (replace_prelu, LEAKY, "y = PRelu(x, same)", *IMAGE),
    "a scalar slope": (replace_prelu, LEAKY, "y = PRelu(x, half)", *IMAGE),
    "a slope above one": (replace_prelu, LEAKY, "y = PRelu(x, steep)", *IMAGE),
    "slopes by channel": (replace_prelu, MAX, "y = PRelu(x, channels)", *IMAGE),
    "slopes by column": (replace_prelu, MAX, "y = PRelu(x, columns)", *IMAGE),
    "mean": (replace_reduce_mean, POOL, MEAN, *POOLED),
    "mean of axes from behind": (replace_reduce_mean, POOL, "y = ReduceMean <axes = [-1,-2]> (x)", *POOLED),
    "flat mean": (replace_reduce_mean, FLATTENED, "y = ReduceMean <axes = [2,3], keepdims = 0> (x)", *FLAT),
    "mean of opset 18": (replace_reduce_mean, POOL, "y = ReduceMean(x, axes)", *POOLED, 18),
    "flat mean of opset 18": (replace_reduce_mean, FLATTENED, "y = ReduceMean <keepdims = 0> (x, axes)", *FLAT, 18),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_node_goes_or_becomes_another(name: str) -> None:
    run, wanted, *rest = REPLACED[name]
    before = model(*rest)
    rtol = 0 if run is remove_dead else 1e-7 if run is replace_prelu else 2e-6
    result, report = kit.assert_rewritten(run, before, wanted, rtol)
    assert run is not remove_dead or len(report.changed) == len(before.graph.node) - 1
    assert run is not remove_dead or not result.graph.initializer
    inside = kit.in_branch(before)
    kit.assert_same(inside, kit.apply(run, inside)[0], rtol=0 if run is remove_dead else 2e-6)


RESIDUAL = "float[2,3,8] x, float[2,3,8] z", "float[2,3,8] y"
STAYING: dict[str, tuple[Any, ...]] = {
    "an identity of an output": (remove_dead, "h = Relu(x) y = Identity(h)", *ROWS),
    "an identity of the input": (remove_dead, "y = Identity(x)", *ROWS),
    "a dropout switched at run time": (remove_dead, f"{SWITCH} h = Dropout(x, half, on) y = Relu(h)", *ROWS),
    "a dropout with its mask": (remove_dead, "h, m = Dropout(x) c = Cast <to = 1> (m) y = Add(h, c)", *ROWS),
    "times two": (remove_dead, "h = Mul(x, two) y = Relu(h)", *ROWS),
    "times ones of another shape": (remove_dead, "h = Mul(x, ones) y = Relu(h)", "float[N,5] x", "float[A,B] y"),
    "times one of more axes": (remove_dead, "h = Mul(x, deep) y = Relu(h)", "float[N,5] x", "float[A,B,C] y"),
    "a reciprocal": (remove_dead, "h = Div(one, x) y = Relu(h)", *ROWS),
    "a negative": (remove_dead, "h = Sub(zero, x) y = Relu(h)", *ROWS),
    "a rounding cast": (remove_dead, "h = Cast <to = 10> (x) c = Cast <to = 1> (h) y = Relu(c)", *ROWS),
    "a pad": (remove_dead, "h = Pad(x, onepad) y = Relu(h)", "float[N,5] x", "float[A,B] y"),
    "gathered in reverse": (remove_dead, "h = Gather(x, reversed) y = Relu(h)", "float[4] x", "float[4] y"),
    "gathered in part": (remove_dead, "h = Gather(x, ordered) y = Relu(h)", "float[5] x", "float[4] y"),
    "strided to another shape": (remove_dead, STRIDED, "float[1,2,1,2] x", "float[1,4,1,1] y"),
    "a slope above one among others": (replace_prelu, "y = PRelu(x, above)", *IMAGE),
    "a slope of 0 among others": (replace_prelu, "y = PRelu(x, with0)", *IMAGE),
    "a slope given at run time": (replace_prelu, "y = PRelu(x, s)", f"{IMAGE[0]}, float[4,1,1] s", IMAGE[1]),
    "a mean of channels": (replace_reduce_mean, "y = ReduceMean <axes = [1]> (x)", IMAGE[0], "float[N,1,5,6] y"),
    "a mean of columns": (replace_reduce_mean, "y = ReduceMean <axes = [3]> (x)", IMAGE[0], "float[N,4,5,1] y"),
    "a mean of a sample": (replace_reduce_mean, "y = ReduceMean <axes = [1,2,3]> (x)", IMAGE[0], "float[N,1,1,1] y"),
    "a mean of all": (replace_reduce_mean, "y = ReduceMean (x)", IMAGE[0], "float[1,1,1,1] y"),
    "a mean of a matrix": (replace_reduce_mean, "y = ReduceMean <axes = [1]> (x)", "float[N,4] x", "float[N,1] y"),
    "a mean of integers": (replace_reduce_mean, MEAN, "int32[N,4,5,6] x", "int32[N,4,1,1] y"),
    "a mean of doubles": (replace_reduce_mean, MEAN, "double[N,4,5,6] x", "double[N,4,1,1] y"),
    "a mean of squares": (replace_reduce_mean, f"s = Mul(x, x) {LAST}", "float[N,4,5] x", "float[N,4,1] y"),
    "a maximum": (replace_reduce_mean, "y = ReduceMax <axes = [2,3]> (x)", *POOLED),
    "an Add of a constant": (reorder_residual, NORMED.replace("x, z", "x, gamma"), "float[2,3,8] x", RESIDUAL[1]),
    "an Add without a norm": (reorder_residual, "h = Add(x, z) y = Mul(h, two)", *RESIDUAL),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_does_something_else_stays(name: str) -> None:
    run, *rest = STAYING[name]
    kit.assert_untouched(run, model(*rest))


def test_a_residual_add_is_no_skip_layernorm() -> None:
    before = model(NORMED, *RESIDUAL)
    assert kit.ops(optimize_graph(before))["SkipLayerNormalization"] == 1  # why the pass is there
    result, _ = kit.assert_rewritten(reorder_residual, before, {"Sum": 1, "LayerNormalization": 1}, rtol=0)
    assert kit.ops(optimize_graph(result)) == {"Sum": 1, "LayerNormalization": 1}


# ---- Pads that join the convolution behind them.

W = np.random.default_rng(0).standard_normal((6, 4, 3, 3)).astype(F)
PADDED = "p = Pad(x, amounts) y = Conv <kernel_shape = [3,3]> (p, w)"
ENDS = ("float[N,4,7,8] x", "float[N,6,A,B] y")


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_any_pad_joins_the_convolutions_own(outer: list[int], inner: list[int]) -> None:
    assume(any(outer))
    lines = f"p = Pad(x, amounts) y = Conv <kernel_shape = [3,3], pads = {inner}, strides = [2,1]> (p, w)"
    before = model(lines, *ENDS, w=W, amounts=np.array([0, 0, *outer[:2], 0, 0, *outer[2:]]))
    result, _ = kit.assert_rewritten(fold_pad, before, {"Conv": 1})
    assert list(GraphIndex(result).nodes[0].attrs["pads"]) == [a + b for a, b in zip(outer, inner, strict=True)]


@pytest.mark.parametrize("value", [-np.inf, np.finfo(F).min])
@pytest.mark.parametrize(("outer", "own"), [([1, 0, 1, 2], ""), ([0, 1, 1, 0], ", pads = [1,1,0,2]")])
def test_a_pad_with_the_lowest_value_joins_the_pads_of_a_pool(value: float, outer: list[int], own: str) -> None:
    """As timm writes a pool of TensorFlow's sizes: of -inf no scale is found, and all around it stayed float."""
    lines = f"p = Pad(x, amounts, low) y = MaxPool <kernel_shape = [3,3], strides = [2,2]{own}> (p)"
    before = model(lines, *ENDS, low=F(value), amounts=np.array([0, 0, *outer[:2], 0, 0, *outer[2:]]))
    kit.assert_rewritten(fold_pad, before, {"MaxPool": 1})


AMOUNTS = [0, 0, 1, 2, 0, 0, 2, 1]


@pytest.mark.parametrize(
    ("opset", "pad"),
    [
        (10, f"Pad <pads = {AMOUNTS}> (x)"),
        (10, f"Pad <pads = {AMOUNTS}, value = 0.0> (x)"),
        (13, "Pad(x, amounts)"),
        (13, "Pad(x, amounts, zero)"),
        (13, "Pad(x, amounts, minus)"),
        (18, "Pad(x, some, , last)"),
        (18, "Pad(x, some, zero, last)"),
        (18, "Pad(x, some, minus, last)"),
    ],
)
@pytest.mark.parametrize("auto", ["VALID", ""])
def test_every_form_of_pad(opset: int, pad: str, auto: str) -> None:
    given = {"amounts": np.array(AMOUNTS), "some": np.array([1, 2, 2, 1]), "last": np.array([2, -1]), "minus": -0.0}
    # Some exporters write an empty one, which means no automatic padding.
    lines = f'p = {pad} y = Conv <kernel_shape = [3,3], auto_pad = "{auto}"> (p, w)'
    before = model(lines, *ENDS, opset, w=W, **given)
    result, _ = kit.assert_rewritten(fold_pad, before, {"Conv": 1})
    assert "auto_pad" not in GraphIndex(result).nodes[0].attrs


ONES = [0, 0, 1, 1, 0, 0, 1, 1]


def test_one_pad_for_two_convolutions() -> None:
    lines = f"{PADDED} z = Conv <kernel_shape = [3,3]> (p, v)"
    before = model(lines, ENDS[0], f"{ENDS[1]}, float[N,6,A,B] z", w=W, v=-W, amounts=np.array(ONES))
    kit.assert_rewritten(fold_pad, before, {"Conv": 2})


@pytest.mark.parametrize(
    ("lines", "amounts"),
    [
        pytest.param(PADDED, [0, 0, -1, 0, 0, 0, 1, 0], id="crop"),
        pytest.param(PADDED, [1, 0, 1, 1, 0, 0, 1, 1], id="batch"),
        pytest.param(PADDED.replace("w)", "w6)"), [0, 1, 1, 1, 0, 1, 1, 1], id="channels"),
        pytest.param(PADDED.replace("amounts)", "amounts, one)"), ONES, id="ones"),
        pytest.param(PADDED.replace("Pad(", 'Pad <mode = "reflect"> ('), ONES, id="reflect"),
        pytest.param(PADDED.replace("<kernel", '<auto_pad = "SAME_UPPER", kernel'), ONES, id="same"),
        pytest.param("p = Pad(x, amounts) y = MaxPool <kernel_shape = [3,3]> (p)", ONES, id="maxpool"),
        pytest.param(
            "p = Pad(x, amounts, low) y = MaxPool <kernel_shape = [1,3]> (p)", ONES, id="larger than a window"
        ),
        pytest.param("p = Pad(x, amounts, low) y, i = MaxPool <kernel_shape = [3,3]> (p)", ONES, id="places"),
        pytest.param("p = Pad(x, amounts, low) y = MaxPool <kernel_shape = [3,3], ceil_mode = 1> (p)", ONES, id="up"),
        pytest.param("p = Pad(x, amounts) y = AveragePool <kernel_shape = [3,3]> (p)", ONES, id="averagepool"),
        pytest.param(PADDED + " z = Relu(p)", ONES, id="reader"),
        pytest.param(PADDED, None, id="computed"),
    ],
)
def test_pads_that_stay(lines: str, amounts: list[int] | None) -> None:
    head = "float[2,4,7,8] x" if amounts else "float[2,4,7,8] x, int64[8] amounts"
    out = "float[a,b,c,d] y, float[e,f,g,h] z" if "z =" in lines else "float[a,b,c,d] y"
    given = {"amounts": np.array(amounts), "low": F(-np.inf)} if amounts else {}
    kit.assert_untouched(fold_pad, model(lines, head, out, w=W, w6=np.ones((6, 6, 3, 3), F), **given))


# What a Keras LSTM becomes: the body multiplies by a weight that each step hands to the next.
BODY = "step (int64 k, bool on, float[5] h, float[5,5] m) => (bool on, float[5] g, float[5,5] m) { g = MatMul(h, m) }"
LOOP = f"r, last = Loop(three, , x, w) <body = {BODY}>"
INNER = f"s, i = Loop(three, , h, m) <body = {BODY.replace('step', 'inner')}>"
NESTED = LOOP.replace("g = MatMul(h, m)", f"{INNER} g = Tanh(s)")
SCAN = """last, r = Scan <num_scan_inputs = 1, body = step (float[5,5] m, float[5] h)
    => (float[5,5] n, float[5] g) { n = Identity(m) g = MatMul(h, m) }> (w, rows)"""
VECTOR, VECTORS = ("float[5] x", "float[5] y"), ("float[3,5] rows", "float[3,5] y")
STEPS = {"three": np.asarray(3), "w": np.linspace(-0.5, 0.6, 25, dtype=F).reshape(5, 5)}


@pytest.mark.parametrize(
    ("lines", "ends"),
    [
        pytest.param(f"{LOOP} y = Relu(r)", VECTOR, id="loop"),
        pytest.param(f"{LOOP.replace(' m', ' w')} y = Relu(r)", VECTOR, id="of the same name inside"),
        pytest.param(f"{LOOP} y = MatMul(r, last)", VECTOR, id="read behind the loop, too"),
        pytest.param(f"{NESTED} y = Relu(r)", VECTOR, id="a loop inside"),
        pytest.param(f"{SCAN} y = Relu(r)", VECTORS, id="scan"),
    ],
)
def test_what_a_loop_hands_on_unchanged_is_read_from_outside(lines: str, ends: tuple[str, str]) -> None:
    after, report = kit.assert_changed(read_invariants, model(lines, *ends, **STEPS))
    assert len(report.changed) == 1
    products = [node for node in GraphIndex(name_nodes(after)).nodes if node.op_type == "MatMul"]
    assert all(node.inputs[1] in ("w", "m" if "inner" in lines else "w") for node in products)


def test_parts_of_it_are_constants() -> None:
    lines = LOOP.replace("g = MatMul(h, m)", "p = Neg(m) g = MatMul(h, p)")
    after, _ = kit.assert_changed(read_invariants, model(f"{lines} y = Relu(r)", *VECTOR, **STEPS))
    index = GraphIndex(name_nodes(after))
    (product,) = [node for node in index.nodes if node.op_type == "MatMul"]
    assert index.has_constant(product, 1)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(LOOP, id="given out"),
        pytest.param(LOOP.replace("x, w)", "x, v)"), id="computed"),
        pytest.param(LOOP.replace("float[5,5] m) {", "float[5,5] n) { n = Neg(m)"), id="changed"),
        pytest.param(LOOP.replace("float[5] h", "float[5] w").replace("(h,", "(w,"), id="another of its name inside"),
    ],
)
def test_what_a_loop_hands_on_that_stays(lines: str) -> None:
    out = f"{VECTOR[1]}, float[5,5] last" if lines == LOOP else VECTOR[1]
    before = model(f"v = Exp(w) {lines} y = Add(r, z)", VECTOR[0], out, z=np.ones(5, F), **STEPS)
    kit.assert_untouched(read_invariants, before)
