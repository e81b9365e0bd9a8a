"""What provokes Q3xx and Q4xx, and codes of models and calls of other tools and of custom operators."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnxq
from onnxq import compat, import_calibration
from onnxq.backends import load_config
from onnxq.config import ProveConfig
from onnxq.engines.prove.prove import ProveRequest, prove_model
from onnxq.engines.shapes import parse_shapes
from onnxq.evaluation.metric import parse_drop
from onnxq.observers import register_observer
from onnxq.plan import Plan, from_json
from onnxq.runtime import Session
from onnxq.runtime.session import check_loaded
from onnxq.spec import QuantSpec
from tests.codes.kit import EVERYTHING, FORCE, gemm, quantized, reach, reach_each, rows, written
from tests.custom_ops.models import network as swell
from tests.pipeline.models import residual
from tests.pipeline.test_requantize import leaving
from tests.pipeline.test_requantize import quantized as requantized


def configured(folder: Path, text: str) -> None:
    load_config(written(folder, text, "my.yaml"))


def with_rule(rule: dict[str, Any]) -> Plan:
    return onnxq.make_plan(gemm(), config=load_config(None, {"rules": [rule]}))


@reach("Q321")
def not_for_a_cache(folder: Path):
    cache = written(folder, "TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "c.cache")
    import_calibration(cache, gemm(), config="trt-int4-weights")


@reach("Q406")
def no_kernel(_: Path):
    made = quantized(config=load_config("trt-int8", {"rules": [FORCE]})).plan
    onnxq.apply(gemm(64, 64), replace(made, sites=tuple(
        replace(site, spec=replace(site.spec, symmetric=False)) if site.role.value == "activation" else site
        for site in made.sites
    )))  # fmt: skip


reach_each(
    {
        "Q301": lambda _: load_config("ort-int9"),
        "Q323": lambda _: check_loaded(Session(gemm()).native, "CUDAExecutionProvider"),
        "Q324": lambda folder: onnxq.make_plan(
            gemm(), None, written(folder, "runtime: {libraries: ops.so}", "my.yaml")
        ),
        "Q302": lambda folder: configured(folder, "target: ["),
        "Q303": lambda folder: configured(folder, "targt: ort"),
        "Q304": lambda folder: configured(folder, "bias: int16"),
        "Q305": lambda folder: configured(folder, "target: ort\ntarget: trt"),
        "Q306": lambda folder: configured(folder, "extends: my.yaml"),
        "Q307": lambda folder: configured(folder, "target: trt\nactivations: {scheme: asymmetric}"),
        "Q308": lambda _: parse_drop("little"),
        "Q309": lambda _: with_rule({"node": "none", "set": {"float": True}}),
        "Q310": lambda _: register_observer("minmax")(object),
        "Q325": lambda _: load_config(None, {"target": "ort,qnn"}),
        "Q312": lambda _: prove_model(gemm(), ProveRequest(options=ProveConfig(engine="coral"))),
        "Q313": lambda _: QuantSpec(bits=9),
        "Q314": lambda _: with_rule({"between": ["y", "none"], "set": {"float": True}}),
        "Q315": lambda _: parse_shapes(["x"]),
        "Q317": lambda _: prove_model(
            gemm(), ProveRequest(options=ProveConfig(engine="tensorrt-rtx", require_exact=True))
        ),
        "Q319": lambda _: onnxq.quantize(gemm(), overrides={"min_sqnr": 20, "latency": False}),
        "Q320": lambda _: onnxq.make_plan(gemm(), overrides={"skip": ("nothing",)}),
        "Q401": lambda _: from_json("[]"),
        "Q411": lambda folder: onnxq.annotate_bits(gemm(), beside=written(folder, "{}", "notes.json")),
        "Q405": lambda _: onnxq.apply(gemm(64, 64), onnxq.make_plan(gemm(64, 64), config=EVERYTHING)),
    }
)


# ---- What provokes codes of models and calls of other tools, of edited plans and of custom operators.


@reach("W123")
def unrun(_: Path):
    proto = swell()
    # Nothing in front of it can be run.
    proto.graph.node[0].input[0] = "v"
    proto.graph.node.insert(0, helper.make_node("Swell", ["x"], ["v"], domain="example.ops"))
    return onnxq.quantize(proto, config="ort-int8-weights").report.warnings


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
        "Q125": lambda _: requantized(requantized(residual()).model),
        "R115": lambda _: (
            requantized(requantized(residual(), leaving("c/Conv")).model, leaving("d/Conv")).plan.refusals
        ),
    }
)
