"""Operators that gain little time and make most of the noise stay float in `mode: auto`, unless rules ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import onnxq
from onnxq.passes.mixed_precision.noisy_pairs import FLOAT_NAME as NAME
from tests.passes.kit import parse

# A small product of values with a heavy tail, in front of large ones of even values.
TEXT = """g (float[N,T,64] x) => (float[N,T,256] y) {
    [first] h = MatMul(x, w)
    [norm] n = LayerNormalization <axis=-1> (h, g)
    [up] u = MatMul(n, v)
    [relu] r = Relu(u)
    [down] y = MatMul(r, z)
}"""


def model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in {"w": (64, 256), "v": (256, 1024), "z": (1024, 256), "g": (256,)}.items():
        value = np.ones(shape) if name == "g" else rng.standard_normal(shape) / shape[0] ** 0.5
        weights[name] = value.astype(np.float32)
    return parse(TEXT, **weights)


def samples() -> list[dict[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((16, 1, 96, 64)) * np.exp(1.5 * rng.standard_normal((16, 1, 96, 64)))
    return [{"x": one.astype(np.float32)} for one in x]


def quantize(**overrides: Any) -> onnxq.Result:
    return onnxq.quantize(model(), samples(), overrides={"latency": False, "skip": ["promotion"], **overrides})


def list_left(result: onnxq.Result) -> list[str]:
    return [one.subject for one in result.report.left_float if one.code == "F106"]


def worst_db(result: onnxq.Result) -> float:
    return min(check.sqnr_db[0] for check in result.report.checks)


def test_a_small_operator_that_spoils_the_rest_stays_float() -> None:
    static, chosen = quantize(), quantize(mode="auto")
    assert list_left(static) == []
    assert list_left(chosen) == ["first"]
    assert any(line.startswith(NAME) for line in chosen.report.accounts)
    assert worst_db(chosen) > worst_db(static) + 6


@pytest.mark.parametrize(
    "overrides", [{"skip": ["promotion", NAME]}, {"rules": [{"node": "first", "set": {"quantize": True}}]}]
)
def test_unless_it_is_skipped_or_asked_for(overrides: dict[str, Any]) -> None:
    assert list_left(quantize(mode="auto", **overrides)) == []
