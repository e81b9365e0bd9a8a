"""Residual Adds in front of LayerNormalization."""

from __future__ import annotations

import numpy as np

from onnxq.passes.rewrites.single_nodes import reorder_residual
from onnxq.runtime import optimize_graph
from tests.passes.kit import apply, assert_same, assert_untouched, ops, parse

F = np.float32
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
