"""Operators that make most of the noise, in `mode: auto`: left float, or with a scale for each run; nobody else."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import onnxq
from onnxq.passes.mixed_precision.noisy_pairs import DYNAMIC, FLOAT_NAME
from onnxq.sites import Role
from tests.passes.kit import parse
from tests.pipeline.models import find_worst_db, list_accounts, quantize

# A small product of values with a heavy tail, in front of large ones of even values.
NOISY = """g (float[N,T,64] x) => (float[N,T,256] y) {
    [first] h = MatMul(x, w) [norm] n = LayerNormalization <axis=-1> (h, g) [up] u = MatMul(n, v) [relu] r = Relu(u)
    [down] y = MatMul(r, z)
}"""
# A product whose input may be of any size, in front of one of even values.
MOVING = """g (float[N,T,64] x) => (float[N,T,64] y) {
    [first] h = MatMul(x, w) [norm] n = LayerNormalization <axis=-1> (h, g) [second] y = MatMul(n, v)
}"""
MATMULS = [{"op": "MatMul", "set": {"quantize": True}}]


def model(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return parse(text, g=np.ones(256, np.float32), **{name: w.astype(np.float32) for name, w in weights.items()})


def noisy_samples() -> list[dict[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((16, 1, 96, 64)) * np.exp(1.5 * rng.standard_normal((16, 1, 96, 64)))
    return [{"x": one.astype(np.float32)} for one in x]


def moving_samples(spread: float) -> list[dict[str, NDArray[np.float32]]]:
    """16 samples, each on a scale of its own: 10 to the power of +-spread."""
    rng = np.random.default_rng(1)
    scales = 10 ** np.linspace(-spread, spread, 16)
    return [{"x": (scale * rng.standard_normal((1, 96, 64))).astype(np.float32)} for scale in scales]


def quantize_noisy(**overrides: Any) -> onnxq.Result:
    proto = model(NOISY, w=(64, 256), v=(256, 1024), z=(1024, 256))
    return quantize(proto, noisy_samples(), "ort-int8", **{"skip": ["promotion"], **overrides})


def quantize_moving(samples: Any, **overrides: Any) -> onnxq.Result:
    proto = model(MOVING, w=(64, 256), v=(256, 64))
    return quantize(proto, samples, "ort-int8", **{"rules": MATMULS, "mode": "auto", **overrides})


def list_left(result: onnxq.Result) -> list[str]:
    return [one.subject for one in result.report.left_float if one.code == "F106"]


def find_dynamic(result: onnxq.Result) -> set[str]:
    return {str(site.site) for site in result.plan.sites if site.role is Role.ACTIVATION and site.spec.dynamic}


def test_a_small_operator_that_spoils_the_rest_stays_float() -> None:
    static, chosen = quantize_noisy(), quantize_noisy(mode="auto")
    assert list_left(static) == []
    assert list_left(chosen) == ["first"]
    assert list_accounts(chosen, FLOAT_NAME)
    assert find_worst_db(chosen) > find_worst_db(static) + 6


@pytest.mark.parametrize(
    "overrides", [{"skip": ["promotion", FLOAT_NAME]}, {"rules": [{"node": "first", "set": {"quantize": True}}]}]
)
def test_unless_it_is_skipped_or_asked_for(overrides: dict[str, Any]) -> None:
    assert list_left(quantize_noisy(mode="auto", **overrides)) == []


def test_a_range_that_moves_with_the_input_gets_a_scale_for_each_run() -> None:
    # Without promotion, which would leave the product float.
    static, chosen = (
        quantize_moving(moving_samples(1.5), skip=["promotion"], mode=mode) for mode in ("static", "auto")
    )
    assert find_dynamic(chosen) == {"first/in0"}
    assert list_accounts(chosen, DYNAMIC)
    assert find_worst_db(chosen) > find_worst_db(static) + 1


def test_ranges_that_stay_are_calibrated() -> None:
    result = quantize_moving(moving_samples(0.0))
    assert not find_dynamic(result)
    assert result.plan.calibrated


def test_without_samples_every_scale_is_of_its_run() -> None:
    result = quantize_moving(None)
    assert find_dynamic(result) == {"x", "n"}
    assert not result.report.synthetic
