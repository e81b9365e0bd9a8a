"""Operators at tensors that calibration has no range of stay float, and the others do not."""

import numpy as np
import pytest

import onnxq
from tests.passes.kit import parse

F = np.float32
RNG = np.random.default_rng(0)
W = (RNG.standard_normal((64, 64)) / 8).astype(F)
CAUSAL = np.triu(np.full((16, 16), -np.inf, F), 1)

BRANCH = """g (float[N,64] x, bool c) => (float[N,64] y) { m = MatMul(x, w)
    b = If(c) <then_branch = t () => (float[N,64] a) { a = Relu(m) },
               else_branch = e () => (float[N,64] d) { k = Sigmoid(m) d = Add(k, m) }> y = MatMul(b, w) }"""
EMPTY = "g (float[N,64] x, float[M,64] z) => (float[N,64] y, float[M,64] n) { y = MatMul(x, w) n = MatMul(z, w) }"
LOG = "g (float[N,64] x) => (float[N,64] y) { m = MatMul(x, w) r = Relu(m) l = Log(r) s = Softmax(l) y = MatMul(s, w) }"
MASKED = """g (float[1,16,64] x, float[16,16] mask) => (float[1,16,64] y) { q = MatMul(x, w)
    t = Transpose<perm = [0,2,1]>(q) s = MatMul(q, t) m = Add(s, mask) p = Softmax(m) c = MatMul(p, q)
    y = MatMul(c, w) }"""


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


@pytest.mark.parametrize(
    ("text", "make", "reason"),
    [
        (BRANCH, lambda: {"x": draw(4, 64), "c": np.array(True)}, "never ran the branch"),
        (EMPTY, lambda: {"x": draw(4, 64), "z": np.zeros((0, 64), F)}, "always empty"),
        (LOG, lambda: {"x": draw(4, 64)}, "holds -inf"),
        (MASKED, lambda: {"x": draw(1, 16, 64) / 4, "mask": CAUSAL}, ""),
    ],
    ids=["branch", "empty", "log", "mask"],
)
def test_operators_without_a_range_stay_float(text, make, reason):
    samples = [make() for _ in range(12)]
    overrides = {"target": "virtual", "effort": "fast", "latency": False}
    result = onnxq.quantize(parse(text, w=W), samples, overrides=overrides)
    assert result.report.pairs
    assert result.plan.calibrated
    told = [refusal.reason for refusal in result.plan.refusals if refusal.code == "R106"]
    assert len(told) == bool(reason)
    assert all(reason in one for one in told)
    assert min(check.sqnr_db[0] for check in result.report.checks) > 25
