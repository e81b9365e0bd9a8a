"""What `bound` is for: ONNX Runtime runs Conv -> Clip -> Q in int8 only where it can drop the Clip.

It drops it where the Clip's ends quantize to qmin and qmax, so that saturation does the Clip's work
(tests/passes/test_ort_facts.py). `bound` asks for more: every level inside the Clip. ONNX Runtime up to 1.30 refuses to
load a model that has the first without the second ("Invalid model. Node input 'xd' is not a graph input, …"), which a
two-sided Clip with a free scale runs into.
"""

import numpy as np
import pytest

from onnxq.numerics import qparams_from_range
from onnxq.runtime import optimize_graph
from onnxq.spec import QParams, QuantSpec
from tests.passes.kit import ops, parse

UINT8 = QuantSpec(signed=False, symmetric=False)
WEIGHT = np.random.default_rng(0).integers(-127, 127, (8, 8, 1, 1)).astype(np.int8)
TEXT = """g (float[1,8,6,6] x) => (float[1,8,6,6] y) {
    xq = QuantizeLinear(x, xs, xz) xd = DequantizeLinear(xq, xs, xz) wd = DequantizeLinear(w, ws, wz)
    v = Conv(xd, wd) c = Clip(v, lo, hi) q = QuantizeLinear(c, s, z) y = DequantizeLinear(q, s, z) }"""


def fuses(low: float, high: float, numbers: QParams) -> bool:
    """Whether ONNX Runtime computes DQ -> Conv -> Clip(low, high) -> Q in integers."""
    constants = {"xs": 0.05, "xz": np.uint8(0), "w": WEIGHT, "ws": 0.01, "wz": np.int8(0), "lo": low, "hi": high}
    model = parse(TEXT, **constants, s=numbers.scale, z=numbers.zero_point.astype(np.uint8))
    kernels = set(ops(optimize_graph(model)))
    assert ("QLinearConv" in kernels) != bool(kernels & {"Clip", "Conv", "FusedConv"})
    return "QLinearConv" in kernels


@pytest.mark.parametrize("high", [6.0, 1.0, 0.1, 3.3, 1000.0])
def test_a_relu6_fuses(high: float) -> None:
    assert fuses(0.0, high, qparams_from_range(0.0, high, UINT8, bound=(0.0, high)))


def test_every_clip_fuses_with_its_bound_whatever_was_seen() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        low, high = float(np.float32(-np.exp(rng.uniform(-2, 2)))), float(np.float32(np.exp(rng.uniform(-2, 2))))
        seen = rng.uniform(0.3, 1.0, 2)
        numbers = qparams_from_range(low * seen[0], high * seen[1], UINT8, bound=(low, high))
        assert fuses(low, high, numbers), (low, high, seen)


def test_without_its_bound_a_clip_may_keep_the_conv_float() -> None:
    assert not fuses(-1.0, 1.0, qparams_from_range(-1.0, 1.0, UINT8))
    assert fuses(-1.0, 1.0, qparams_from_range(-1.0, 1.0, UINT8, bound=(-1.0, 1.0)))
