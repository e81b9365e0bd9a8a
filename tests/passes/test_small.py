"""Pad, ReduceMean, PRelu, residual Adds and nodes that do nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxq.graph import GraphIndex
from onnxq.passes.rewrites.dead import remove_dead
from onnxq.passes.rewrites.pad import fold_pad
from onnxq.passes.rewrites.pool import replace_reduce_mean
from onnxq.passes.rewrites.prelu import replace_prelu
from onnxq.passes.rewrites.residual import reorder_residual
from onnxq.runtime import optimize_graph
from tests.passes.kit import apply, assert_same, assert_untouched, in_branch, ops, parse

F = np.float32
W = np.random.default_rng(0).standard_normal((6, 4, 3, 3)).astype(F)
PADDED = "p = Pad(x, amounts) y = Conv <kernel_shape = [3,3]> (p, w)"
IMAGE = "g (float[N,4,7,8] x) => (float[N,6,A,B] y)"


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_any_pad_joins_the_convolutions_own(outer: list[int], inner: list[int]) -> None:
    assume(any(outer))
    conv = f"y = Conv <kernel_shape = [3,3], pads = [{','.join(map(str, inner))}], strides = [2,1]> (p, w)"
    amounts = np.array([0, 0, *outer[:2], 0, 0, *outer[2:]])
    model = parse(f"{IMAGE} {{ p = Pad(x, amounts) {conv} }}", w=W, amounts=amounts)
    result, _ = apply(fold_pad, model)
    assert ops(result) == {"Conv": 1}
    assert list(GraphIndex(result).nodes[0].attrs["pads"]) == [a + b for a, b in zip(outer, inner, strict=True)]
    assert_same(model, result)


@pytest.mark.parametrize("value", [0.0, -0.0, None])
@pytest.mark.parametrize("opset", [10, 13, 18])
def test_every_form_of_pad(value: float | None, opset: int) -> None:
    amounts = np.array([0, 0, 1, 2, 0, 0, 2, 1])
    held = {"w": W, "amounts": amounts}
    read = "x, amounts"
    if opset == 18:
        held |= {"amounts": np.array([1, 2, 2, 1]), "axes": np.array([2, -1])}
        read = "x, amounts, zero, axes" if value is not None else 'x, amounts, "", axes'
    elif value is not None:
        read += ", zero"
    if value is not None:
        held["zero"] = np.asarray(F(value))
    lines = f"p = Pad({read})".replace('""', "") + " y = Conv <kernel_shape = [3,3], auto_pad = 'VALID'> (p, w)"
    if opset == 10:
        attrs = f"pads = [{','.join(map(str, amounts))}]" + ("" if value is None else ", value = 0.0")
        lines, held = lines.replace(f"Pad({read})", f"Pad <{attrs}> (x)"), {"w": W}
    lines = lines.replace("'VALID'", '"VALID"')
    model = parse(f"{IMAGE} {{ {lines} }}", opset=opset, **held)
    result, _ = apply(fold_pad, model)
    assert ops(result) == {"Conv": 1}
    assert "auto_pad" not in GraphIndex(result).nodes[0].attrs
    assert_same(model, result)


def test_one_pad_for_two_convolutions() -> None:
    text = f"{IMAGE.replace('y)', 'y, float[N,6,A,B] z)')} {{ {PADDED} z = Conv <kernel_shape = [3,3]> (p, v) }}"
    model = parse(text, w=W, v=-W, amounts=np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    result, _ = apply(fold_pad, model)
    assert ops(result) == {"Conv": 2}
    assert_same(model, result)


@pytest.mark.parametrize(
    ("lines", "amounts"),
    [
        (PADDED, [0, 0, -1, 0, 0, 0, 1, 0]),
        (PADDED, [1, 0, 1, 1, 0, 0, 1, 1]),
        (PADDED.replace("w)", "w6)"), [0, 1, 1, 1, 0, 1, 1, 1]),
        (PADDED.replace("amounts)", "amounts, one)"), [0, 0, 1, 1, 0, 0, 1, 1]),
        (PADDED.replace("Pad(", 'Pad <mode = "reflect"> ('), [0, 0, 1, 1, 0, 0, 1, 1]),
        (PADDED.replace("<kernel", '<auto_pad = "SAME_UPPER", kernel'), [0, 0, 1, 1, 0, 0, 1, 1]),
        ("p = Pad(x, amounts) y = MaxPool <kernel_shape = [3,3]> (p)", [0, 0, 1, 1, 0, 0, 1, 1]),
        ("p = Pad(x, amounts) y = AveragePool <kernel_shape = [3,3]> (p)", [0, 0, 1, 1, 0, 0, 1, 1]),
        (PADDED + " z = Relu(p)", [0, 0, 1, 1, 0, 0, 1, 1]),
        (PADDED + " z = Identity(y)", "given"),
    ],
    ids=["crop", "batch", "channels", "ones", "reflect", "same", "maxpool", "averagepool", "reader", "computed"],
)
def test_pads_that_stay(lines: str, amounts: list[int] | str) -> None:
    held: dict[str, np.ndarray | float] = {}
    if "w)" in lines:
        held["w"] = W
    if "w6)" in lines:
        held["w6"] = np.ones((6, 6, 3, 3), F)
    if "one)" in lines:
        held["one"] = 1.0
    head = IMAGE.replace("N,4", "2,4") if "w" in held or "w6" in held else IMAGE.replace("N,6", "N,4")
    head = head.replace("N,6", "M,6").replace("y)", "y, float[a,b,c,d] z)") if " z =" in lines else head
    if amounts == "given":
        head = head.replace("x)", "x, int64[8] amounts)")
    else:
        held["amounts"] = np.array(amounts)
    if "MaxPool" in lines or "AveragePool" in lines:
        head = head.replace("float[N,4,A,B] y", "float[a,b,c,d] y")
    assert_untouched(fold_pad, parse(f"{head.replace('M,6,A,B', 'a,b,c,d')} {{ {lines} }}", **held))


MEANS = {
    "kept": ("float[N,4,1,1]", "y = ReduceMean <axes = [2,3]> (x)", {"GlobalAveragePool": 1}),
    "negative": ("float[N,4,1,1]", "y = ReduceMean <axes = [-1,-2], keepdims = 1> (x)", {"GlobalAveragePool": 1}),
    "dropped": (
        "float[N,4]",
        "y = ReduceMean <axes = [2,3], keepdims = 0> (x)",
        {"GlobalAveragePool": 1, "Flatten": 1},
    ),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("opset", [13, 18])
def test_a_mean_over_space_is_a_pool(name: str, opset: int) -> None:
    out, line, wanted = MEANS[name]
    held = {}
    if opset == 18:
        for axes in ("2,3", "-1,-2"):
            line = line.replace(f"axes = [{axes}], ", "").replace(f" <axes = [{axes}]>", "")
        line, held = line.replace("(x)", "(x, axes)"), {"axes": np.array([2, 3])}
    model = parse(f"g (float[N,4,5,6] x) => ({out} y) {{ {line} }}", opset=opset, **held)
    result, _ = apply(replace_reduce_mean, model)
    assert ops(result) == wanted
    assert_same(model, result)
    inside = in_branch(model)
    assert_same(inside, apply(replace_reduce_mean, inside)[0])


@pytest.mark.parametrize(
    ("line", "out", "x"),
    [
        ("y = ReduceMean <axes = [1]> (x)", "float[N,1,5,6]", "float[N,4,5,6]"),
        ("y = ReduceMean <axes = [3]> (x)", "float[N,4,5,1]", "float[N,4,5,6]"),
        ("y = ReduceMean <axes = [1,2,3]> (x)", "float[N,1,1,1]", "float[N,4,5,6]"),
        ("y = ReduceMean (x)", "float[1,1,1,1]", "float[N,4,5,6]"),
        ("y = ReduceMean <axes = [1]> (x)", "float[N,1]", "float[N,4]"),
        ("y = ReduceMean <axes = [2,3]> (x)", "int32[N,4,1,1]", "int32[N,4,5,6]"),
        ("y = ReduceMean <axes = [2,3]> (x)", "double[N,4,1,1]", "double[N,4,5,6]"),
        ("y = ReduceMax <axes = [2,3]> (x)", "float[N,4,1,1]", "float[N,4,5,6]"),
    ],
)
def test_other_means_stay(line: str, out: str, x: str) -> None:
    assert_untouched(replace_reduce_mean, parse(f"g ({x} x) => ({out} y) {{ {line} }}"))


SLOPES = {
    "one number": (np.full((4, 1, 1), 0.1, F), {"LeakyRelu": 1}),
    "a scalar": (np.asarray(F(0.2)), {"LeakyRelu": 1}),
    "above one": (np.full((1,), 1.5, F), {"LeakyRelu": 1}),
    "by channel": (np.array([0.1, 0.5, -0.3, 1.0], F).reshape(4, 1, 1), {"Max": 1, "Mul": 1}),
    "by column": (np.array([0.1, 0.5, 0.3, 1, 0.2, 0.6], F), {"Max": 1, "Mul": 1}),
}


@pytest.mark.parametrize("name", SLOPES)
def test_a_constant_slope(name: str) -> None:
    slope, wanted = SLOPES[name]
    model = parse("g (float[N,4,5,6] x) => (float[N,4,5,6] y) { y = PRelu(x, slope) }", slope=slope)
    result, _ = apply(replace_prelu, model)
    assert ops(result) == wanted
    assert_same(model, result, rtol=1e-7)
    inside = in_branch(model)
    assert_same(inside, apply(replace_prelu, inside)[0], rtol=1e-7)


@pytest.mark.parametrize(
    "slope", [np.array([0.1, 0.5, 0.3, 1.1], F).reshape(4, 1, 1), np.array([0, 0.5, 0.3, 1], F).reshape(4, 1, 1)]
)
def test_slopes_that_max_would_get_wrong_stay(slope: np.ndarray) -> None:
    text = "g (float[N,4,5,6] x) => (float[N,4,5,6] y) { y = PRelu(x, slope) }"
    assert_untouched(replace_prelu, parse(text, slope=slope))


def test_a_slope_given_at_run_time_stays() -> None:
    text = "g (float[N,4,5,6] x, float[4,1,1] slope) => (float[N,4,5,6] y) { y = PRelu(x, slope) }"
    assert_untouched(replace_prelu, parse(text))


RESIDUAL = "g (float[2,3,8] x, float[2,3,8] z) => (float[2,3,8] y) { h = Add(x, z) y = LayerNormalization(h, gamma) }"


def test_a_residual_add_is_no_skip_layernorm() -> None:
    model = parse(RESIDUAL, gamma=np.ones(8, F))
    assert ops(optimize_graph(model))["SkipLayerNormalization"] == 1  # why the pass is there
    result, _ = apply(reorder_residual, model)
    assert ops(result) == {"Sum": 1, "LayerNormalization": 1}
    assert ops(optimize_graph(result)) == {"Sum": 1, "LayerNormalization": 1}
    assert_same(model, result, rtol=0)


def test_adds_that_are_no_residual_stay() -> None:
    assert_untouched(
        reorder_residual, parse(RESIDUAL.replace(", float[2,3,8] z)", ")"), gamma=np.ones(8, F), z=np.ones(8, F))
    )
    assert_untouched(
        reorder_residual, parse(RESIDUAL.replace("LayerNormalization(h, gamma)", "Mul(h, gamma)"), gamma=2.0)
    )


DEAD = {
    "identity": ("h = Identity(x) y = Relu(h)", {}),
    "row of identities": ("a = Identity(x) b = Identity(a) h = Identity(b) y = Relu(h)", {}),
    "dropout": ("h = Dropout(x) y = Relu(h)", {}),
    "dropout off": ("h = Dropout(x, ratio, off) y = Relu(h)", {"ratio": 0.5, "off": np.asarray(False)}),
    "times one": ("h = Mul(x, one) y = Relu(h)", {"one": np.ones(1, F)}),
    "one times": ("h = Mul(one, x) y = Relu(h)", {"one": 1.0}),
    "over one": ("h = Div(x, one) y = Relu(h)", {"one": 1.0}),
    "plus zero": ("h = Add(zero, x) y = Relu(h)", {"zero": np.zeros((1, 1), F)}),
    "minus zero": ("h = Sub(x, zero) y = Relu(h)", {"zero": 0.0}),
    "cast to itself": ("h = Cast <to = 1> (x) y = Relu(h)", {}),
    "empty pad": ("h = Pad(x, none) y = Relu(h)", {"none": np.zeros(4, np.int64)}),
    "read by nobody": ("h = Sqrt(x) i = Neg(h) y = Relu(x)", {}),
}


@pytest.mark.parametrize("name", DEAD)
def test_what_does_nothing_goes(name: str) -> None:
    lines, held = DEAD[name]
    model = parse(f"g (float[N,5] x) => (float[N,5] y) {{ {lines} }}", **held, unused=1.0)
    result, report = apply(remove_dead, model)
    assert ops(result) == {"Relu": 1}
    assert len(report.changed) == len(model.graph.node) - 1
    assert not result.graph.initializer
    assert_same(model, result, rtol=0)
    inside = in_branch(model)
    assert_same(inside, apply(remove_dead, inside)[0], rtol=0)


@pytest.mark.parametrize(
    ("lines", "held"),
    [
        ("h = Relu(x) y = Identity(h)", {}),
        ("y = Identity(x)", {}),
        (
            "s = ReduceMax <keepdims = 0> (x) on = Cast <to = 9> (s) h = Dropout(x, ratio, on) y = Relu(h)",
            {"ratio": 0.5},
        ),
        ("h, m = Dropout(x) c = Cast <to = 1> (m) y = Add(h, c)", {}),
        ("h = Mul(x, two) y = Relu(h)", {"two": 2.0}),
        ("h = Mul(x, ones) y = Relu(h)", {"ones": np.ones((3, 5), F)}),
        ("h = Mul(x, deep) y = Relu(h)", {"deep": np.ones((1, 1, 1), F)}),
        ("h = Div(one, x) y = Relu(h)", {"one": 1.0}),
        ("h = Sub(zero, x) y = Relu(h)", {"zero": 0.0}),
        ("h = Cast <to = 10> (x) c = Cast <to = 1> (h) y = Relu(c)", {}),
        ("h = Pad(x, some) y = Relu(h)", {"some": np.array([0, 1, 0, 0])}),
    ],
)
def test_what_does_something_stays(lines: str, held: dict[str, np.ndarray | float]) -> None:
    head = f"g (float[N,5] x) => (float[{'A,B,C' if 'deep' in lines else 'A,B'}] y)"
    assert_untouched(remove_dead, parse(f"{head} {{ {lines} }}", **held))
