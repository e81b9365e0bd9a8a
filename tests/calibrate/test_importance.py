from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxq.calibrate.constants import estimate_importance
from onnxq.commands.quantize import quantize
from onnxq.config import load_config
from onnxq.graph import GraphIndex
from onnxq.numerics import fake_quant
from onnxq.plan import SitePlan
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import QuantSpec

GAMMA = np.array([0.1, 1, 2, 4], np.float32)
TEXT = """
<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
net (float[N, 4] x) => (float[N, 3] y)
<float[4] gamma = {0.1, 1, 2, 4}, float[4] beta = {1, 0, 0, 0}, float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12},
 float[3, 4] t = {1,2,3,4,5,6,7,8,9,10,11,12}>
"""


def _weigh(body: str, name: str = "w", shape: tuple[int, ...] = (4, 3)) -> Any:
    index = GraphIndex(parser.parse_model(TEXT + body))
    edges = tuple(Edge(node.name, 1) for node in index.nodes if node.op_type in ("MatMul", "Gemm"))
    return estimate_importance(
        index, SitePlan(site=TensorId(name), role=Role.WEIGHT, spec=QuantSpec(), consumers=edges), shape
    )


@pytest.mark.parametrize(
    ("norm", "beta"),
    [
        ("LayerNormalization (x, gamma, beta)", 1),
        ("LayerNormalization (x, gamma)", 0),
        ("com.microsoft.SkipSimplifiedLayerNormalization (x, x, gamma)", 0),
        ("Mul (gamma, x)", 0),
    ],
)
def test_power_of_channels_is_that_of_the_norms_scale_and_bias(norm: str, beta: float) -> None:
    power = GAMMA**2 + [beta, 0, 0, 0]
    wanted = np.maximum(power / power.mean(), 1e-3)
    found = _weigh(f"{{ [n] h = {norm} [m] y = MatMul (h, w) }}")
    np.testing.assert_allclose(found, wanted[:, None], rtol=1e-6)
    turned = _weigh(f"{{ [n] h = {norm} [m] y = Gemm <transB = 1> (h, t) }}", "t", (3, 4))
    np.testing.assert_allclose(turned, wanted[None, :], rtol=1e-6)


def test_other_inputs_say_nothing() -> None:
    assert _weigh("{ [n] h = Relu (x) [m] y = MatMul (h, w) }") is None
    assert _weigh("{ [m] y = MatMul (x, w) }") is None
    # A weight with another reader counts both.
    found = _weigh("{ [n] h = Mul (x, gamma) [m] y = MatMul (h, w) [r] a = Relu (x) [k] b = MatMul (a, w) }")
    assert found.mean() == pytest.approx(1)
    assert found.max() < (GAMMA**2 / np.mean(GAMMA**2)).max()


def test_blocks_behind_a_norm_are_rounded_for_the_output() -> None:
    rng = np.random.default_rng(0)
    gamma, w = np.exp(rng.normal(size=64)).astype(np.float32), rng.laplace(size=(64, 16)).astype(np.float32)
    text = '<ir_version: 10, opset_import: ["" : 21]> net (float[N, 64] x) => (float[N, 16] y) '
    errors = []
    x = rng.normal(size=(500, 64)).astype(np.float32)
    for norm in ("LayerNormalization (x, g)", "Relu (x)"):
        proto = parser.parse_model(text + f"{{ [n] h = {norm} [m] y = MatMul (h, w) }}")
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(*one) for one in ((gamma, "g"), (w, "w")))
        site = quantize(proto, None, load_config("ort-int4-weights")).plan.sites[0]
        assert site.qparams is not None
        gap = fake_quant(w, site.qparams, site.spec) - w
        errors.append(np.square((x * gamma) @ gap).sum())
    assert errors[0] < 0.95 * errors[1]
