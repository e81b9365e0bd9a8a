"""Scales of each run in `mode: auto`: where the range moves with the input, and nowhere else."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray

import onnxq
from onnxq.passes.mixed_precision.noisy_pairs import DYNAMIC as NAME
from onnxq.sites import Role
from tests.passes.kit import parse

TEXT = """g (float[N,T,64] x) => (float[N,T,64] y) {
    [first] h = MatMul(x, w)
    [norm] n = LayerNormalization <axis=-1> (h, g)
    [second] y = MatMul(n, v)
}"""
QUIET = {"latency": False, "rules": [{"op": "MatMul", "set": {"quantize": True}}]}


def model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in {"w": (64, 256), "v": (256, 64), "g": (256,)}.items():
        value = np.ones(shape) if name == "g" else rng.standard_normal(shape) / 8
        weights[name] = value.astype(np.float32)
    return parse(TEXT, **weights)


def samples(spread: float) -> list[dict[str, NDArray[np.float32]]]:
    """16 samples, each on a scale of its own: 10 to the power of +-spread."""
    rng = np.random.default_rng(1)
    scales = 10 ** np.linspace(-spread, spread, 16)
    return [{"x": (scale * rng.standard_normal((1, 96, 64))).astype(np.float32)} for scale in scales]


def find_dynamic(result: onnxq.Result) -> set[str]:
    return {str(site.site) for site in result.plan.sites if site.role is Role.ACTIVATION and site.spec.dynamic}


def test_a_range_that_moves_with_the_input_gets_a_scale_for_each_run() -> None:
    # Without promotion, which would leave the product float.
    asked = {**QUIET, "skip": ["promotion"]}
    static, chosen = (
        onnxq.quantize(model(), samples(1.5), overrides={**asked, "mode": mode}) for mode in ("static", "auto")
    )
    assert find_dynamic(chosen) == {"first/in0"}
    assert any(account.startswith(NAME) for account in chosen.report.accounts)
    accuracy = [min(check.sqnr_db[0] for check in one.report.checks) for one in (static, chosen)]
    assert accuracy[1] > accuracy[0] + 1


def test_ranges_that_stay_are_calibrated() -> None:
    result = onnxq.quantize(model(), samples(0.0), overrides={**QUIET, "mode": "auto"})
    assert not find_dynamic(result)
    assert result.plan.calibrated


def test_without_samples_every_scale_is_of_its_run() -> None:
    result = onnxq.quantize(model(), None, overrides={**QUIET, "mode": "auto"})
    assert find_dynamic(result) == {"x", "n"}
    assert not result.report.synthetic
