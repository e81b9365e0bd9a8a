"""Means over space that are pools."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.passes.rewrites.single_nodes import replace_reduce_mean
from tests.passes.kit import apply, assert_same, assert_untouched, in_branch, ops, parse

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
        ("s = Mul(x, x) y = ReduceMean <axes = [2]> (s)", "float[N,4,1]", "float[N,4,5]"),
        ("s = Pow(x, two) y = ReduceMean <axes = [-1]> (s)", "float[N,4,1]", "float[N,4,5]"),
        ("y = ReduceMax <axes = [2,3]> (x)", "float[N,4,1,1]", "float[N,4,5,6]"),
    ],
)
def test_other_means_stay(line: str, out: str, x: str) -> None:
    model = parse(f"g ({x} x) => ({out} y) {{ {line} }}", two=np.float32(2))
    assert_untouched(replace_reduce_mean, model)
