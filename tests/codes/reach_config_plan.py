"""What provokes Q3xx and Q4xx."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import onnxq
from onnxq import import_calibration
from onnxq.backends import load_config
from onnxq.config import ProveConfig
from onnxq.engines.prove.prove import ProveRequest, prove_model
from onnxq.engines.shapes import parse_shapes
from onnxq.evaluation.metric import parse_drop
from onnxq.numerics import quantize
from onnxq.observers import register_observer
from onnxq.plan import Plan, from_json, to_json
from onnxq.runtime import Session
from onnxq.runtime.session import check_loaded
from onnxq.spec import PerChannel, QParams, QuantSpec
from tests.codes.kit import EVERYTHING, FORCE, F, gemm, model, quantized, reach, reach_each, written


def configured(folder: Path, text: str) -> None:
    load_config(written(folder, text, "my.yaml"))


def with_rule(rule: dict[str, Any]) -> Plan:
    return onnxq.make_plan(gemm(), config=load_config(None, {"rules": [rule]}))


@reach("Q311")
def option_of_an_observer(_: Path):
    observer = {"name": "percentile", "percentile": 12.0}
    quantized(config=load_config(EVERYTHING, {"activations": {"observer": observer}}))


@reach("Q321")
def not_for_a_cache(folder: Path):
    cache = written(folder, "TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "c.cache")
    import_calibration(cache, gemm(), config="trt-int4-weights")


@reach("Q402")
def other_weights(_: Path):
    onnxq.apply(gemm(64, 64, w=np.ones((64, 64), F)), quantized().plan)


@reach("Q403")
def strange_entry(_: Path):
    raw = json.loads(to_json(onnxq.make_plan(gemm())))
    from_json(json.dumps({**raw, "colour": 1}))


@reach("Q404")
def other_model(_: Path):
    other = model("g (float[N,64] x) => (float[N,64] y) { y = Relu(x) }")
    onnxq.apply(other, quantized().plan)


@reach("Q406")
def no_kernel(_: Path):
    made = quantized(config=load_config("trt-int8", {"rules": [FORCE]})).plan
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
    done = quantized()
    sites = tuple(
        replace(site, values=np.full((1, 1), 99, np.int8)) if site.role.value == "weight" else site
        for site in done.plan.sites
    )
    onnxq.apply(gemm(64, 64), replace(done.plan, sites=sites))


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
