"""Float, quantized without and with optimizations: what agrees, what does not, and the smallest piece that shows it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxq
from onnxq.backends import load_config
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.engines.diff.compare import compare_models
from onnxq.engines.diff.model import OFF, ON
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex
from onnxq.runtime import Session
from tests.engines.diff.models import by_name, chain, pairs, samples, sqnr
from tests.pipeline.models import EVERYTHING, images, residual

ORT_ALONE = load_config(overrides={"diff.engines": ["ort"]})


@pytest.fixture(scope="module")
def float_model() -> onnx.ModelProto:
    return chain()


def test_a_sound_model_agrees_within_rounding(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(
        float_model, pairs(float_model), samples(), overrides={"layers": True, "bisect": True, "engines": ["ort"]}
    )
    assert [run.name for run in found.runs] == ["float", OFF, ON]
    assert all(run.samples == 12 for run in found.runs)
    (y,) = found.outputs
    assert [error.run for error in y.accuracy] == [OFF, ON]
    assert all(25 < error.sqnr_db < 45 for error in y.accuracy)
    assert [error.run for error in y.engines] == [ON]
    assert y.engines[0].sqnr_db > 100
    assert (found.divergences, found.bisections, found.skipped) == ((), (), ())
    assert found.holds


def test_samples_are_streamed(float_model: onnx.ModelProto) -> None:
    """Sums do not care whether samples come one by one, and none but the wanted ones is recorded."""
    named = GraphIndex(float_model)
    quantized = pairs(float_model)
    data = load_data(samples(12), named.inputs)
    result = compare_models(float_model, quantized, data, ORT_ALONE, keep=3)
    assert len(result.recorder.inputs) == 3
    assert {len(kept) for kept in result.recorder.outputs.values()} == {3}
    whole = Session(quantized, threads=1).run(samples(12))["y"]
    reference = Session(float_model, optimize=False, threads=1).run(samples(12))["y"]
    noise = np.square(whole.astype(np.float64) - reference).sum()
    expected = 10 * math.log10(np.square(reference.astype(np.float64)).sum() / noise)
    assert result.difference.outputs[0].accuracy[1].sqnr_db == pytest.approx(expected, abs=1e-3)


def test_a_model_is_itself(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(
        float_model, float_model, samples(), overrides={"layers": True, "engines": ["ort"], "min_sqnr": 100}
    )
    assert found.outputs[0].accuracy[0].sqnr_db == math.inf
    assert found.holds


def test_what_onnxq_quantizes_agrees() -> None:
    result = onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False})
    found = onnxq.diff(
        residual(), result.model, images(4, seed=7), overrides={"layers": True, "bisect": True, "engines": ["ort"]}
    )
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
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[N,8] x) => (float[N,4] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
        " v = DequantizeLinear<axis=0>(w, ws) y = MatMul(d, v) }"
    )
    arrays = {
        "s": np.float32(0.05), "z": np.uint8(128), "ws": np.linspace(0.01, 0.1, 8, dtype=np.float32),
        "w": np.arange(32, dtype=np.int8).reshape(8, 4),
    }  # fmt: skip
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items())
    float_proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\ng (float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }'
    )
    weight = arrays["w"].astype(np.float32) * arrays["ws"][:, None]
    float_proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    data = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    found = onnxq.diff(float_proto, proto, data, overrides={"layers": True, "bisect": True, "engines": ["ort"]})
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


def test_a_quantized_model_that_runs_nowhere_is_an_error(float_model: onnx.ModelProto) -> None:
    broken = pairs(float_model)
    broken.graph.node[-1].op_type = "MatMulX"
    with pytest.raises(ModelError, match="MatMulX"):
        onnxq.diff(float_model, broken, samples(), overrides={"engines": ["ort"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.input[0].__setattr__("name", "z"), "inputs"),
        (lambda graph: graph.output[0].__setattr__("name", "z"), "outputs"),
    ],
)
def test_models_that_do_not_belong_together(float_model: onnx.ModelProto, change, message: str) -> None:  # type: ignore[no-untyped-def]
    other = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\ng (float[N,32] x) => (float[N,32] y) { y = Relu(x) }'
    )
    change(other.graph)
    other.graph.node[0].input[0], other.graph.node[0].output[0] = other.graph.input[0].name, other.graph.output[0].name
    with pytest.raises(ModelError, match=message):
        onnxq.diff(float_model, other, samples(), overrides={"engines": ["ort"]})


def test_samples_can_be_fewer(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, pairs(float_model), samples(), overrides={"samples": 5, "engines": ["ort"]})
    assert (found.samples, found.runs[0].samples) == (5, 5)


def test_without_data_it_says_so(float_model: onnx.ModelProto) -> None:
    found = onnxq.diff(float_model, pairs(float_model), overrides={"engines": ["ort"]})
    assert found.synthetic
    assert found.samples >= 1


def test_the_account_is_frozen(float_model: onnx.ModelProto) -> None:
    data = load_data(samples(2), GraphIndex(float_model).inputs, DataConfig())
    found = compare_models(float_model, pairs(float_model), data, ORT_ALONE).difference
    with pytest.raises(AttributeError):
        found.samples = 3  # type: ignore[misc]
    assert replace(found, samples=3).samples == 3


def test_a_model_made_for_tensorrt_need_not_run_fused_in_ort() -> None:
    """ORT 1.31 takes FP8 pairs as they are, and makes of them integer kernels that do not exist."""
    result = onnxq.quantize(residual(), images(), "trt-fp8", overrides={"latency": False})
    found = onnxq.diff(residual(), result.model, images(2, seed=7), overrides={"layers": True})
    assert OFF in [run.name for run in found.runs]
    assert sqnr(by_name(found)["y"], OFF) > 15
    if ON in [one.subject for one in found.skipped]:
        assert ON not in found.missing
        asked = onnxq.diff(residual(), result.model, images(2, seed=7), overrides={"engines": ["ort"]})
        assert asked.missing == (ON,)
