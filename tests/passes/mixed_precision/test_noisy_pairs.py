"""Operators that make most of the noise, in `mode: auto`: left float, or with a scale for each run; nobody else."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import onnxq
from onnxq.backends import load_config
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


def moving_samples(spread: float) -> list[dict[str, NDArray[np.float32]]]:
    """16 samples, each on a scale of its own: 10 to the power of +-spread."""
    rng = np.random.default_rng(1)
    scales = 10 ** np.linspace(-spread, spread, 16)
    return [{"x": (scale * rng.standard_normal((1, 96, 64))).astype(np.float32)} for scale in scales]


def quantize_noisy(**overrides: Any) -> onnxq.Result:
    proto = model(NOISY, w=(64, 256), v=(256, 1024), z=(1024, 256))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((16, 1, 32, 64)) * np.exp(1.5 * rng.standard_normal((16, 1, 32, 64)))
    samples = [{"x": one.astype(np.float32)} for one in x]
    return quantize(proto, samples, "ort-int8", **{"skip": ["promotion"], **overrides})


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


SKIP = ("cross_layer_equalization", "bias_absorption", "smoothquant", "ranges", "rounding")
DEEP = 24


def chain(count: int, *loud: int) -> onnx.ModelProto:
    """1x1 convolutions with Relu; those in `loud` read a channel a thousand times the others, and hardly use it."""
    rng = np.random.default_rng(0)
    weights = []
    for _ in range(count):
        weight = np.eye(8, dtype=np.float32) * 0.8 + rng.standard_normal((8, 8)).astype(np.float32) * 0.1
        weights.append(weight[:, :, None, None])
    for k in loud:
        weights[k - 1][0] *= 1000.0
        weights[k][:, 0] /= 1000.0
    lines = " ".join(f"[conv{k}] c{k} = Conv(r{k}, w{k}) r{k + 1} = Relu(c{k})" for k in range(count))
    text = f"chain (float[N, 8, 6, 6] r0) => (float[N, 8, 6, 6] r{count}) {{ {lines} }}"
    return parse(text, **{f"w{k}": weight for k, weight in enumerate(weights)})


def quantized(proto: onnx.ModelProto, **raw: object) -> onnxq.Result:
    data = {"r0": np.abs(np.random.default_rng(1).standard_normal((32, 8, 6, 6))).astype(np.float32)}
    config = load_config("trt-int8").model_copy(update={"effort": "balanced", "skip": SKIP, **raw})
    return quantize(proto, data, config)


def float_convs(result: onnxq.Result) -> set[str]:
    held = {edge.node for site in result.plan.sites if site.role is Role.WEIGHT for edge in site.consumers or ()}
    return {f"conv{k}" for k in range(DEEP)} - held


SKIPPED = {"skip": (*SKIP, "sensitive_ops", "promotion")}
FAST = {"skip": (*SKIP, "promotion"), "effort": "fast"}


@pytest.mark.parametrize(("at", "without"), [(1, SKIPPED), (11, FAST), (DEEP - 1, SKIPPED)])
def test_the_operator_to_blame_stays_float_and_the_summary_says_so(at: int, without: dict[str, Any]) -> None:
    result = quantized(chain(DEEP, at))
    assert float_convs(result) == {f"conv{at}"}
    assert f"conv{at} stays float" in list_accounts(result, "sensitive_ops")[0]
    assert any(r.subject == f"conv{at}" and "most of the noise" in r.reason for r in result.plan.left_float)
    plain = quantized(chain(DEEP, at), **without)
    assert float_convs(plain) == set()
    assert not list_accounts(plain, "sensitive_ops")
    assert find_worst_db(result) - find_worst_db(plain) > 3.0


def test_where_nobody_stands_out_and_where_none_can_be_spared_nothing_is_done() -> None:
    assert float_convs(quantized(chain(DEEP))) == set()
    assert list_accounts(quantized(chain(DEEP - 1, 5)), "sensitive_ops") == ["sensitive_ops: nothing to gain"]


def test_of_two_to_blame_only_as_many_stay_float_as_can_be_spared() -> None:
    assert len(float_convs(quantized(chain(DEEP, 7, 15)))) <= 1


def test_an_outlier_of_one_sample_spoils_batches_on_scales_of_each_run() -> None:
    """Each sample alone has a scale of its own, and nothing to be seen of it."""
    rng, at = np.random.default_rng(0), 11
    steps = [f"[node{k}] m{k + 1} = MatMul({'h' if k == at else f'm{k}'}, w{k})" for k in range(DEEP)]
    steps.insert(at, f"h = Add(m{at}, z)")
    weights = {f"w{k}": np.linalg.qr(rng.standard_normal((32, 32)))[0].astype(np.float32) for k in range(DEEP)}
    # What is far out goes no further.
    weights[f"w{at}"][0] = 0
    text = f"g (float[N, 8, 32] m0, float[N, 8, 32] z) => (float[N, 8, 32] m{DEEP}) {{ {' '.join(steps)} }}"
    proto = parse(text, **weights)
    samples = [
        {name: rng.standard_normal((1, 8, 32)).astype(np.float32) * (name == "m0") for name in ("m0", "z")}
        for _ in range(24)
    ]
    samples[3]["z"][..., 0] = 300.0
    rules = [{"op": "MatMul", "set": {"quantize": True}}]
    result = quantize(proto, samples, "ort-dynamic", skip=[*SKIP, "promotion"], rules=rules)
    assert {left.subject for left in result.report.left_float} == {f"node{at}"}
    assert len(list_accounts(result, "sensitive_ops")) == 1
