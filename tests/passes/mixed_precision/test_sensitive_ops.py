"""One operator to blame for the noise: found by halves, left float, told, and never a second choice."""

from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.sites import Role
from tests.passes.kit import parse
from tests.pipeline.models import find_worst_db, list_accounts, quantize

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
    text = " ".join(f"[conv{k}] c{k} = Conv(r{k}, w{k}) r{k + 1} = Relu(c{k})" for k in range(count))
    return parse(
        f"chain (float[N, 8, 6, 6] r0) => (float[N, 8, 6, 6] r{count}) {{ {text} }}",
        **{f"w{k}": weight for k, weight in enumerate(weights)},
    )


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
    small = quantized(chain(DEEP - 1, 5))
    assert list_accounts(small, "sensitive_ops") == ["sensitive_ops: nothing to gain"]


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
