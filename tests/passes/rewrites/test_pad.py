"""Pads that join the convolution behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxq.graph import GraphIndex
from onnxq.passes.rewrites.single_nodes import fold_pad
from tests.passes.kit import apply, assert_same, assert_untouched, ops, parse

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
