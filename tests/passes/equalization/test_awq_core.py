"""AWQ's factors: room for weights that large inputs meet."""

from __future__ import annotations

import numpy as np

from onnxq.numerics import fake_quant, weight_qparams
from onnxq.passes.equalization.smoothquant_core import (
    AWQ_ALPHAS,
    SmoothedWeight,
    compute_awq_scaling,
    search_awq_exponent,
)
from onnxq.spec import PerBlock, QuantSpec

F = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


INT4 = QuantSpec(bits=4, signed=False, symmetric=False, granularity=PerBlock(0, 4), storage="uint4")


def test_awq_gives_room_to_weights_that_large_inputs_meet() -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((200, 16)).astype(F) * np.where(np.arange(16) % 4 == 1, 30, 1).astype(F)
    readers = [SmoothedWeight(normal(16, 9, seed=4), INT4), SmoothedWeight(normal(16, 5, seed=5), INT4)]
    s, alpha, error, plain = search_awq_exponent(rows, readers)
    assert alpha in AWQ_ALPHAS
    assert error < 0.7 * plain
    assert set(np.argsort(s)[-4:] % 4) == {1}
    assert np.isclose(np.log(s).mean(), 0, atol=1e-5)
    # What it promises is what the rounded weights do.
    for reader in readers:
        scaled = reader.weight * s[:, None]
        rounded = fake_quant(scaled, weight_qparams(scaled, INT4), INT4)
        assert np.square((rows / s) @ rounded - rows @ reader.weight).sum() < np.square(rows @ reader.weight).sum() / 20


def test_awq_leaves_dead_inputs_finite() -> None:
    rows = np.zeros((4, 8), F)
    assert compute_awq_scaling(rows, 0.5).tolist() == [1.0] * 8
    rows[:, 2] = 3
    s = compute_awq_scaling(rows, 0.5)
    assert np.isfinite(s).all()
    assert s.argmax() == 2
