"""Float, quantized without and with optimizations: what agrees, what does not, and the smallest piece that shows it."""

import math

import numpy as np
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.data import load_data
from onnxq.engines.diff.compare import compare_models
from onnxq.engines.diff.model import OFF, ON
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex
from onnxq.runtime import Session
from tests.engines.diff.models import CHAIN, PAIRS, by_name, diff, pairs, quantized_cnn, samples, sqnr
from tests.engines.kit import graph
from tests.pipeline.models import images, residual


def test_a_sound_model_agrees_within_rounding() -> None:
    found = diff(CHAIN, PAIRS, samples(), layers=True, bisect=True)
    assert [run.name for run in found.runs] == ["float", OFF, ON]
    assert all(run.samples == 12 for run in found.runs)
    (y,) = found.outputs
    assert [error.run for error in y.accuracy] == [OFF, ON]
    assert all(25 < error.sqnr_db < 45 for error in y.accuracy)
    assert [error.run for error in y.engines] == [ON]
    assert y.engines[0].sqnr_db > 100
    assert (found.divergences, found.bisections, found.skipped) == ((), (), ())
    assert found.holds


def test_samples_are_streamed() -> None:
    """Sums do not care whether samples come one by one, and none but the wanted ones is recorded."""
    data = load_data(samples(12), GraphIndex(CHAIN).inputs)
    result = compare_models(CHAIN, PAIRS, data, load_config(overrides={"diff.engines": ["ort"]}), keep=3)
    assert len(result.recorder.inputs) == 3
    assert {len(kept) for kept in result.recorder.outputs.values()} == {3}
    whole = Session(PAIRS, threads=1).run(samples(12))["y"]
    reference = Session(CHAIN, optimize=False, threads=1).run(samples(12))["y"]
    noise = np.square(whole.astype(np.float64) - reference).sum()
    expected = 10 * math.log10(np.square(reference.astype(np.float64)).sum() / noise)
    assert result.difference.outputs[0].accuracy[1].sqnr_db == pytest.approx(expected, abs=1e-3)


def test_a_model_is_itself() -> None:
    found = diff(CHAIN, CHAIN, samples(), layers=True, min_sqnr=100)
    assert found.outputs[0].accuracy[0].sqnr_db == math.inf
    assert found.holds


def test_samples_can_be_fewer_and_made_up_ones_are_told() -> None:
    found = diff(CHAIN, PAIRS, samples(), samples=5)
    assert (found.samples, found.runs[0].samples, found.synthetic) == (5, 5, False)
    with pytest.raises(AttributeError):
        found.samples = 3  # type: ignore[misc]
    made_up = diff(CHAIN, PAIRS)
    assert made_up.synthetic
    assert made_up.samples >= 1


def test_what_onnxq_quantizes_agrees() -> None:
    found = diff(residual(), quantized_cnn(), images(4, seed=7), layers=True, bisect=True)
    assert found.divergences == ()
    layers = by_name(found)
    assert {"a", "r", "t", "y"} <= set(layers)
    assert layers["y"].at == ""
    assert all(sqnr(layer, OFF) > 15 for layer in layers.values())
    inner = [error.levels for layer in found.layers for error in layer.engines if not math.isnan(error.levels)]
    assert inner
    assert max(inner) <= 3


def test_an_engine_that_cannot_run_the_model_is_told_and_the_rest_is_done() -> None:
    """With weights that are not square ORT's fused product notices the wrong axis and fails."""
    body = """(float[N,8] x) => (float[N,4] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        v = DequantizeLinear<axis=0>(w, ws) y = MatMul(d, v) }"""
    weight, scales = np.arange(32, dtype=np.int8).reshape(8, 4), np.linspace(0.01, 0.1, 8, dtype=np.float32)
    proto = graph(body, s=np.float32(0.05), z=np.uint8(128), ws=scales, w=weight)
    float_proto = graph("(float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }", w=weight * scales[:, None])
    data = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    found = diff(float_proto, proto, data, layers=True, bisect=True)
    assert [run.name for run in found.runs] == ["float", OFF]
    (refusal,) = found.skipped
    assert refusal.subject == ON
    assert "MatMulIntegerToFloat" in refusal.reason
    assert found.missing == (ON,)
    assert not found.holds
    assert found.outputs[0].accuracy[0].sqnr_db > 20
    (piece,) = found.bisections
    assert piece.failure
    assert set(piece.ops) <= {"QuantizeLinear", "DequantizeLinear", "MatMul"}
    assert "y/MatMul" in piece.nodes


def test_a_quantized_model_that_runs_nowhere_is_an_error() -> None:
    broken = pairs(CHAIN)
    broken.graph.node[-1].op_type = "MatMulX"
    with pytest.raises(ModelError, match="MatMulX"):
        diff(CHAIN, broken, samples())


@pytest.mark.parametrize(("x", "y", "message"), [("z", "y", "inputs"), ("x", "z", "outputs")])
def test_models_that_do_not_belong_together(x: str, y: str, message: str) -> None:
    other = graph(f"(float[N,32] {x}) => (float[N,32] {y}) {{ {y} = Relu({x}) }}")
    with pytest.raises(ModelError, match=rf"{message}.*\[Q114\]"):
        diff(CHAIN, other, samples())


def test_a_model_made_for_tensorrt_need_not_run_fused_in_ort() -> None:
    """ORT 1.31 takes FP8 pairs as they are, and makes of them integer kernels that do not exist."""
    result = onnxq.quantize(residual(), images(), "trt-fp8", overrides={"latency": False})
    found = onnxq.diff(residual(), result.model, images(2, seed=7), overrides={"layers": True})
    assert OFF in [run.name for run in found.runs]
    assert sqnr(by_name(found)["y"], OFF) > 15
    if ON in [one.subject for one in found.skipped]:
        assert ON not in found.missing
        asked = diff(residual(), result.model, images(2, seed=7))
        assert asked.missing == (ON,)


def test_padding_does_not_count() -> None:
    """It outweighed the text: MiniLM's file of 24 dB had 10 dB, unlike what `quantize` said of it."""
    head = "(float[N,S,4] x, int64[N,S] attention_mask) => (float[N,S,4] y) { u = Unsqueeze(attention_mask, last) "
    constants = {"last": np.array([2]), "zero": np.zeros(1, np.float32), "far": np.full(1, 5, np.float32)}
    plain, other = (
        graph(head + body, 17, **constants)
        for body in (
            "m = Cast <to=1> (u) z = Mul(m, zero) h = Add(x, z) y = Identity(h) }",
            "m = Cast <to=9> (u) k = Mul(x, far) h = Where(m, x, k) y = Identity(h) }",
        )
    )
    mask = np.ones((3, 6), np.int64)
    mask[:, 4:] = 0
    data = {"x": np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32), "attention_mask": mask}
    found = diff(plain, other, data, layers=True)
    assert [error.sqnr_db for error in found.outputs[0].accuracy] == [math.inf, math.inf]
    assert all(error.sqnr_db == math.inf for layer in found.layers for error in layer.accuracy)
    whole = diff(plain, other, data | {"attention_mask": np.where(mask, 2, 0)})
    assert whole.outputs[0].accuracy[0].sqnr_db < 0
