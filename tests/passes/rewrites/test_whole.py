"""Masks that a scale can hold, and Splits as Slices, for targets that take a graph as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxq.passes.base import RunContext
from onnxq.passes.rewrites.whole import bound_masks, cut_splits, needs_whole
from onnxq.config import Config
from tests.passes.kit import apply, assert_untouched, infer, make_state, ops, parse, read_by

F = np.float32
LOW, INF = float(np.finfo(F).min), -np.inf
SCORES = ("float[2,4,4] x", "float[2,4,4] y")
X = {"x": np.random.default_rng(0).standard_normal((2, 4, 4)).astype(F)}


def triangle(value: float) -> np.ndarray:
    return np.where(np.tri(4, dtype=bool), F(0), F(value)).astype(F)


def model(lines: str, head: str, out: str, opset: int = 18, **values: Any) -> Any:
    return parse(f"g ({head}) => ({out}) {{ {lines} }}", opset=opset, **read_by(lines, values))


VALUES = {"low": triangle(LOW), "infinite": triangle(INF), "never": F(-1e9), "yes": np.tri(4, dtype=bool), "two": F(2),
          "kept": np.tri(4, dtype=F), "one": F(1)}  # fmt: skip
MASKS = {
    "added": "s = Add(x, low) y = Softmax(s)",
    "of infinities": "s = Add(x, infinite) y = Softmax(s)",
    "added to scaled scores": "a = Div(x, two) s = Add(a, low) y = Softmax(s)",
    "chosen": "s = Where(yes, x, never) y = Softmax(s)",
    "computed": "a = Sub(one, kept) m = Mul(a, never) s = Add(x, m) y = Softmax(s)",
}


@pytest.mark.parametrize("lines", MASKS.values(), ids=MASKS)
def test_masks_have_values_that_a_scale_can_hold(lines: str) -> None:
    before = model(lines, *SCORES, **VALUES)
    after, report = apply(bound_masks, before, "qnn")
    assert len(report.changed) == 1
    constants = {tensor.name: tensor for tensor in after.graph.initializer}
    read = [constants[name] for node in after.graph.node for name in node.input if name in constants]
    values = [value for value in map(to_array, read) if value.dtype == F]
    assert min(value.min() for value in values) == -64.0
    np.testing.assert_allclose(infer(after, X)[0], infer(before, X)[0], rtol=1e-6, atol=1e-12)
