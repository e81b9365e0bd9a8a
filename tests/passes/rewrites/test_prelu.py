"""Slopes that LeakyRelu or a maximum computes."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.passes.rewrites.single_nodes import replace_prelu
from tests.passes.kit import apply, assert_same, assert_untouched, in_branch, ops, parse

F = np.float32
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
