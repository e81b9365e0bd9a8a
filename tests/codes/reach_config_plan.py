"""What provokes Q3xx and Q4xx, and codes of models and calls of other tools and of custom operators."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

import onnxq
from onnxq import compat, import_calibration
from onnxq.backends import load_config
from onnxq.evaluation.metric import parse_drop
from onnxq.plan import Plan
from onnxq.runtime import Session
from onnxq.runtime.session import check_loaded
from onnxq.spec import QuantSpec
from tests.codes.kit import FORCE, gemm, quantized, reach, reach_each, written
from tests.custom_ops.models import network as swell


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


@reach("W123")
def unrun(_: Path):
    proto = swell()
    # Nothing in front of it can be run.
    proto.graph.node[0].input[0] = "v"
    proto.graph.node.insert(0, helper.make_node("Swell", ["x"], ["v"], domain="example.ops"))
    return onnxq.quantize(proto, config="ort-int8-weights").report.warnings


def import_anew(module: str) -> list[Any]:
    """Warnings of a module when it is imported."""
    sys.modules.pop(module, None)
    with pytest.warns(compat.CompatWarning) as caught:
        importlib.import_module(module)
    return [warning.message for warning in caught]


reach_each(
    {
        "Q301": lambda _: load_config("ort-int9"),
        "W147": lambda _: import_anew("onnxq.compat.qdq_quantizer"),
        "Q323": lambda _: check_loaded(Session(gemm()).native, "CUDAExecutionProvider"),
        "Q302": lambda folder: configured(folder, "target: ["),
        "Q305": lambda folder: configured(folder, "target: ort\ntarget: trt"),
        "Q306": lambda folder: configured(folder, "extends: my.yaml"),
        "Q308": lambda _: parse_drop("little"),
        "Q313": lambda _: QuantSpec(bits=9),
        "Q314": lambda _: with_rule({"between": ["y", "none"], "set": {"float": True}}),
    }
)
