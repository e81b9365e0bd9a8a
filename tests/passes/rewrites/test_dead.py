"""Nodes that do nothing."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.passes.rewrites.single_nodes import remove_dead
from tests.passes.kit import apply, assert_same, assert_untouched, in_branch, ops, parse

F = np.float32
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
