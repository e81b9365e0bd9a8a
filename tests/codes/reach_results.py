"""What provokes Q5xx to Q8xx, refusals, what is left float, and warnings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnxq
from onnxq.backends import find_engine
from onnxq.backends.engine import TimedModel, Timing
from onnxq.evaluation.compare import check_interface
from onnxq.graph import light
from onnxq.interop.trt_cache import parse_cache
from onnxq.numerics import qparams_from_range
from onnxq.observers import create_observer
from onnxq.spec import ObserverSpec, QuantSpec
from tests.codes.kit import F, fail, gemm, model, quantized, reach, reach_each, rows, saved, written
from tests.interop.models import network

HEADER = "TRT-8601-EntropyCalibration2\n"


@reach("Q705")
def not_built(folder: Path):
    proto = gemm()
    proto.graph.node[0].domain = "com.nobody"
    proto.opset_import.append(helper.make_opsetid("com.nobody", 1))
    return fail("prove", saved(folder, proto), "--engine", "ort")


@reach("Q710")
def no_engine_to_time(folder: Path):
    models = {"m": TimedModel(gemm(), written(folder, "no engine", "engine"), {})}
    find_engine("tensorrt-rtx").time_models(models, Timing(seconds=0.1))


@reach("W127")
def unfitting_inputs(folder: Path):
    # Rows of any number, of which the Reshape takes only some.
    body = "g (float[N,4] x) => (float[A,B] y) { m = MatMul(x, w) y = Reshape(m, shape) }"
    shape, weight = np.array([7, -1]), np.random.default_rng(0).standard_normal((4, 5000)).astype(F)
    path = saved(folder, model(body, w=weight, shape=shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(light, "LARGE_BYTES", 1)
        return onnxq.quantize(path, config="ort-int8-weights").report.warnings


@reach("W137")
def rows_picked_in_iterations(_: Path):
    # The number of rows grows with the iterations.
    body = """g (float[4,8] x) => (float[A,B] y) {
        f = MatMul(x, w) all, y = Loop (two, yes, f) <body = grow (int64 i, bool go, float[N,8] seen)
            => (bool on, float[M,8] more, float[8] row) {
            on = Identity(go) more = Concat <axis = 0> (seen, f) label = ArgMax <axis = 1, keepdims = 0> (more)
            taken = Gather(w, label) row = ReduceSum <keepdims = 0> (taken, zero)
        }>
    }"""
    proto = model(body, w=np.eye(8, dtype=F), two=np.array(2), yes=np.array(True), zero=np.array([0]))
    return onnxq.quantize(proto, rows(16, 8), overrides={"latency": False}).report.warnings


def convert_integers(op: str) -> Any:
    """A file with an operator of ONNX Runtime on integers between pairs, or beside them, as a float network."""
    arrays = {"s": F(0.1), "z": np.uint8(9), "p": np.ones((8, 1, 16), np.uint8), "ps": np.ones((8, 1), F)}
    pair = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
    proto = model(f"g (float[N,32] x) => (float[N,8] y) {{ {pair} y = Neg(d) }}", **arrays)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    inputs = {"MatMulNBits": ["d", "p", "ps", "ps"], "QLinearReduceMean": ["q", "s", "z", "s", "z"]}[op]
    sizes = {"K": 32, "N": 8, "bits": 4, "block_size": 32} if op == "MatMulNBits" else {"keepdims": 1}
    node = helper.make_node(op, inputs, ["n"], "integers", domain="com.microsoft", **sizes)
    proto.graph.node.insert(2, node)
    proto.graph.node[3].input[0] = "n"
    if op == "QLinearReduceMean":
        proto.graph.node[3].CopyFrom(helper.make_node("DequantizeLinear", ["n", "s", "z"], ["y"]))
    return onnxq.convert(proto, "float").report.warnings


reach_each(
    {
        "Q501": lambda _: quantized(
            model("g (float[N,64] x) => (float[N,64] y) { l = Log(x) y = Gemm(l, w) }", w=np.ones((64, 64), F))
        ),
        "Q502": lambda _: create_observer(ObserverSpec("minmax"), QuantSpec(bits=8)).range(),
        "Q504": lambda _: qparams_from_range(np.asarray(2.0), np.asarray(1.0), QuantSpec(bits=8)),
        "Q505": lambda _: parse_cache(b"nonsense\n"),
        "Q506": lambda folder: onnxq.import_calibration(written(folder, f"{HEADER}zzz: 3c010a14\n", "c"), gemm(64, 64)),
        "Q507": lambda folder: onnxq.import_calibration(written(folder, f"{HEADER}input: 3c010a14\n", "c"), network()),
        "W140": lambda _: convert_integers("MatMulNBits"),
        "Q714": lambda _: convert_integers("QLinearReduceMean"),
        "Q702": lambda _: check_interface(gemm(), gemm(4, 5)),
    }
)
