"""What provokes Q3xx and Q4xx."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import onnxq
from onnxq import import_calibration
from onnxq.backends import load_config
from onnxq.engines.prove.prove import ProveRequest, prove_model
from onnxq.engines.shapes import parse_shapes
from onnxq.evaluation.metric import parse_drop
from onnxq.numerics import quantize
from onnxq.observers import register_observer
from onnxq.plan import Plan, from_json, to_json
from onnxq.runtime import Session
from onnxq.runtime.session import check_loaded
from onnxq.spec import PerChannel, QParams, QuantSpec
from tests.codes.kit import EVERYTHING, FORCE, F, gemm, model, reach, rows, written


def configured(folder: Path, text: str) -> None:
    load_config(written(folder, text, "my.yaml"))


@reach("Q301")
def no_preset(_: Path):
    load_config("ort-int9")


@reach("Q323")
def no_gpu_for_the_provider(_: Path):
    check_loaded(Session(gemm()).native, "CUDAExecutionProvider")


@reach("Q324")
def code_in_a_file(folder: Path):
    onnxq.make_plan(gemm(), None, written(folder, "runtime: {libraries: ops.so}", "my.yaml"))


@reach("Q302")
def no_yaml(folder: Path):
    configured(folder, "target: [")


@reach("Q303")
def unknown_key(folder: Path):
    configured(folder, "targt: ort")


@reach("Q304")
def wrong_value(folder: Path):
    configured(folder, "bias: int16")


@reach("Q305")
def key_twice(folder: Path):
    configured(folder, "target: ort\ntarget: trt")


@reach("Q306")
def circle(folder: Path):
    configured(folder, "extends: my.yaml")


@reach("Q307")
def not_for_this_target(folder: Path):
    configured(folder, "target: trt\nactivations: {scheme: asymmetric}")


@reach("Q308")
def no_drop(_: Path):
    parse_drop("little")


def with_rule(rule: dict[str, Any]) -> Plan:
    return onnxq.make_plan(gemm(), config=load_config(None, {"rules": [rule]}))


@reach("Q309")
def a_rule_for_nothing(_: Path):
    with_rule({"node": "none", "set": {"float": True}})


@reach("Q310")
def observer_taken(_: Path):
    register_observer("minmax")(object)


@reach("Q311")
def option_of_an_observer(_: Path):
    observer = {"name": "percentile", "percentile": 12.0}
    plan_of(config=load_config(EVERYTHING, {"activations": {"observer": observer}}))


@reach("Q312")
def unknown_engine(_: Path):
    prove_model(gemm(), ProveRequest(engine="openvino"))


@reach("Q313")
def no_such_spec(_: Path):
    QuantSpec(bits=9)


@reach("Q314")
def no_path(_: Path):
    with_rule({"between": ["y", "none"], "set": {"float": True}})


@reach("Q315")
def sizes(_: Path):
    parse_shapes(["x"])


@reach("Q317")
def contradiction(_: Path):
    prove_model(gemm(), ProveRequest(engine="tensorrt-rtx", require_exact=True))


@reach("Q319")
def samples_needed(_: Path):
    onnxq.quantize(gemm(), overrides={"min_sqnr": 20, "latency": False})


@reach("Q320")
def unknown_pass(_: Path):
    onnxq.make_plan(gemm(), overrides={"skip": ("nothing",)})


@reach("Q321")
def not_for_a_cache(folder: Path):
    cache = written(folder, "TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "c.cache")
    import_calibration(cache, gemm(), config="trt-int4-weights")


def plan_of(proto: Any = None, **wanted: Any) -> onnxq.Result:
    given = {"config": EVERYTHING, "overrides": {"latency": False}, **wanted}
    return onnxq.quantize(gemm(64, 64) if proto is None else proto, rows(8, 64), **given)


@reach("Q401")
def no_plan(_: Path):
    from_json("[]")


@reach("Q402")
def other_weights(_: Path):
    made = plan_of()
    onnxq.apply(gemm(64, 64, w=np.ones((64, 64), F)), made.plan)


@reach("Q403")
def strange_entry(_: Path):
    raw = json.loads(to_json(onnxq.make_plan(gemm())))
    from_json(json.dumps({**raw, "colour": 1}))


@reach("Q404")
def other_model(_: Path):
    other = model("g (float[N,64] x) => (float[N,64] y) { y = Relu(x) }")
    onnxq.apply(other, plan_of().plan)


@reach("Q405")
def no_numbers(_: Path):
    onnxq.apply(gemm(64, 64), onnxq.make_plan(gemm(64, 64), config=EVERYTHING))


@reach("Q406")
def no_kernel(_: Path):
    made = plan_of(config=load_config("trt-int8", {"rules": [FORCE]})).plan
    onnxq.apply(gemm(64, 64), replace(made, sites=tuple(
        replace(site, spec=replace(site.spec, symmetric=False)) if site.role.value == "activation" else site
        for site in made.sites
    )))  # fmt: skip


@reach("Q407")
def wrong_count_of_scales(_: Path):
    numbers = QParams(np.ones(3, F), np.zeros(3, np.int32), "by hand")
    quantize(np.ones((4, 2), F), numbers, QuantSpec(bits=8, granularity=PerChannel(0)))


@reach("Q408")
def wrong_values(_: Path):
    done = plan_of()
    sites = tuple(
        replace(site, values=np.full((1, 1), 99, np.int8)) if site.role.value == "weight" else site
        for site in done.plan.sites
    )
    onnxq.apply(gemm(64, 64), replace(done.plan, sites=sites))
