"""What provokes codes of models and calls of other tools, of edited plans and of custom operators."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnxq
from onnxq import compat
from onnxq.backends import load_config
from onnxq.plan import from_json, to_json
from tests.codes.kit import FORCE, gemm, model, reach, reach_each, rows
from tests.custom_ops.models import network as swell
from tests.passes.kit import parse
from tests.pipeline import test_unchecked_outputs as unchecked
from tests.pipeline.models import images, residual
from tests.pipeline.requantized import by_onnxruntime
from tests.pipeline.test_requantize import EVERYTHING, leaving, quantized
from tests.pipeline.test_requantize import model as graph

UNSIGNED = EVERYTHING.model_copy(
    update={"activations": EVERYTHING.activations.model_copy(update={"scheme": "asymmetric", "signed": False})}
)


@reach("W123")
def unrun(_: Path):
    proto = swell()
    # Nothing in front of it can be run.
    proto.graph.node[0].input[0] = "v"
    proto.graph.node.insert(0, helper.make_node("Swell", ["x"], ["v"], domain="example.ops"))
    return onnxq.quantize(proto, config="ort-int8-weights").report.warnings


@reach("F107")
def weight_only(_: Path):
    text = "g (float[8,256] x) => (float[8,256] y) { i = Relu(x) a = MatMul(i, w) r = Tanh(a) y = MatMul(r, v) }"
    proto = graph(text, weights={"w": (256, 256), "v": (256, 256)})
    part = onnxq.quantize(
        proto, config=leaving("matmul1", config=load_config("ort-int4-weights")), overrides={"latency": False}
    )
    return quantized(part.model).plan.left_float


@reach("W122")
def two_observers(_: Path):
    proto = model(
        "g (float[N,8,8,8] x) => (float[N,8,4,4] y) { c = Conv <pads=[1,1,1,1]>(x, w) "
        "p = MaxPool <kernel_shape=[2,2], strides=[2,2]>(c) y = Conv <pads=[1,1,1,1]>(p, w) }",
        w=np.ones((8, 8, 3, 3), np.float32),
    )
    return onnxq.make_plan(
        proto, config=load_config(None, {"rules": [{"tensor": "p", "set": {"observer": "mse"}}, FORCE]})
    ).warnings


@reach("W149")
def a_rule_for_an_output_in_float(_: Path):
    return onnxq.make_plan(
        residual(), config=load_config("trt-int8", {"rules": [{"role": "output", "set": {"bits": 4}}]})
    ).warnings


@reach("W124")
def other_sign(_: Path):
    signed = EVERYTHING.model_copy(update={"activations": EVERYTHING.activations.model_copy(update={"signed": True})})
    return quantized(quantized(residual(), leaving("c/Conv", "y/Gemm", config=signed)).model, UNSIGNED).plan.warnings


@reach("W125")
def pairs_of_another_engine(folder: Path):
    part = by_onnxruntime(folder, "QDQ", leave=("a/Conv",))
    return onnxq.make_plan(part, images(), load_config("trt-int8", {"effort": "fast"})).warnings


@reach("W129")
def operators_of_another_engine(_: Path):
    proto = parse("g (float[4,4] x) => (float[4,4] y) { y = com.microsoft.Inverse (x) }")
    return onnxq.make_plan(proto, None, "trt-int8").warnings


@reach("W120")
def words(_: Path):
    proto = unchecked.network("words", unchecked._WORDS)
    found = onnxq.quantize(proto, {"x": unchecked._X}, unchecked._CONFIG, overrides=unchecked._FAST)
    return found.report.warnings


@reach("W121")
def other_bits(_: Path):
    raw: dict[str, Any] = json.loads(to_json(quantized(residual()).plan))
    weight = next(site for site in raw["sites"] if site["role"] == "weight")
    weight["spec"]["bits"] = 4
    return onnxq.apply(residual(), from_json(json.dumps(raw)), overrides={"latency": False}).report.warnings


def called(folder: Path, width: int = 4, **how: Any) -> list[Any]:
    """What `onnxq.compat` warns of."""
    with pytest.warns(compat.CompatWarning) as caught:
        compat.quantize_static(gemm(width, width), folder / "q.onnx", rows(8, width), **how)
    return [warning.message for warning in caught]


def import_anew(module: str) -> list[Any]:
    """Warnings of a module when it is imported."""
    sys.modules.pop(module, None)
    with pytest.warns(compat.CompatWarning) as caught:
        importlib.import_module(module)
    return [warning.message for warning in caught]


reach_each(
    {
        "W130": lambda folder: called(
            folder, 64, op_types_to_quantize=["Gemm"], extra_options={"DedicatedQDQPair": True}
        ),
        "W135": called,
        "W147": lambda _: import_anew("onnxq.compat.qdq_quantizer"),
        "W136": lambda folder: called(folder, op_types_to_quantize=["Gemm"]),
        "Q113": lambda _: onnxq.quantize(swell(), {"x": np.zeros((4, 3, 16, 16), np.float32)}),
        "Q322": lambda folder: onnxq.quantize(
            swell(), {"x": np.zeros((4, 3, 16, 16), np.float32)}, overrides={"ort_library": folder / "none.so"}
        ),
        "W131": lambda _: onnxq.quantize(swell(), config="ort-int8-weights").report.warnings,
        "Q125": lambda _: quantized(quantized(residual()).model),
        "R115": lambda _: quantized(quantized(residual(), leaving("c/Conv")).model, leaving("d/Conv")).plan.refusals,
    }
)
