"""A small network quantized by hand, and the same with one weight quantized where ORT's kernels do not look."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxq
from onnxq.engines.diff.model import LayerDiff
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session
from tests.codes.kit import model
from tests.networks import add_arrays
from tests.pipeline.models import EVERYTHING, images, residual

WIDTH = 32
BODY = """g (float[N,32] x) => (float[N,32] y) {
    a = MatMul(x, w0) r = Relu(a) b = MatMul(r, w1) s = Relu(b) y = MatMul(s, w2)
}"""


def chain() -> onnx.ModelProto:
    """Three products with ReLUs between; square weights, so that no kernel can tell their axes apart."""
    rng = np.random.default_rng(0)
    weights = {}
    for k in range(3):
        weight = rng.standard_normal((WIDTH, WIDTH)) * np.exp(rng.standard_normal((WIDTH, 1)))
        weights[f"w{k}"] = weight.astype(np.float32)
    proto = model(BODY, **weights)
    for node in proto.graph.node:
        node.name = f"node_{node.output[0]}"
    return proto


def samples(count: int = 12, seed: int = 5) -> dict[str, np.ndarray]:
    """Inputs for `chain`."""
    return {"x": np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)}


def pairs(proto: onnx.ModelProto, wrong: str = "", *, signed: bool = False) -> onnx.ModelProto:
    """The chain with uint8 (or symmetric int8) activations and int8 weights per column.

    wrong: a weight quantized per row instead: legal ONNX, which ORT's fused kernels read as per column.
    """
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    tapped = onnx.ModelProto.FromString(proto.SerializeToString())
    tapped.graph.output.extend(onnx.ValueInfoProto(name=node.output[0]) for node in proto.graph.node[:-1])
    values = Session(tapped, threads=1).run(samples(64, seed=1)) | samples(64, seed=1)
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    del made.graph.node[:], made.graph.initializer[:]
    for node in proto.graph.node:
        if node.op_type == "MatMul":
            activation = _activation(made.graph, node.input[0], values[node.input[0]], signed)
            axis = 0 if node.input[1] == wrong else 1
            weight = _weight(made.graph, node.input[1], weights[node.input[1]], axis)
            made.graph.node.append(helper.make_node("MatMul", [activation, weight], list(node.output), name=node.name))
        else:
            made.graph.node.append(node)
    onnx.checker.check_model(made)
    return made


def _activation(graph: onnx.GraphProto, name: str, value: np.ndarray, signed: bool) -> str:
    low, high = min(float(value.min()), 0.0), max(float(value.max()), 0.0)
    scale = np.float32(max(-low, high) / 127 if signed else (high - low) / 255)
    zero = np.int8(0) if signed else np.uint8(np.rint(-low / scale))
    add_arrays(graph, **{f"{name}/scale": scale, f"{name}/zero_point": zero})
    numbers = [f"{name}/scale", f"{name}/zero_point"]
    for op, source, target in (("QuantizeLinear", name, "quantized"), ("DequantizeLinear", "", "dequantized")):
        graph.node.append(
            helper.make_node(op, [source or f"{name}/quantized", *numbers], [f"{name}/{target}"], name=f"{name}/{op}")
        )
    return f"{name}/dequantized"


def _weight(graph: onnx.GraphProto, name: str, value: np.ndarray, axis: int) -> str:
    scale = np.abs(value).max(axis=1 - axis, keepdims=True) / 127
    codes = np.rint(value / scale).astype(np.int8)
    add_arrays(graph, **{f"{name}/quantized": codes, f"{name}/scale": scale.reshape(-1).astype(np.float32)})
    inputs, made = [f"{name}/quantized", f"{name}/scale"], f"{name}/dequantized"
    graph.node.append(helper.make_node("DequantizeLinear", inputs, [made], name=f"{name}/DequantizeLinear", axis=axis))
    return made


@cache
def quantized_cnn() -> onnx.ModelProto:
    """`residual` as onnxq quantizes it, all of it."""
    return onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False}).model


def indexed(proto: onnx.ModelProto) -> GraphIndex:
    return GraphIndex(infer_shapes(name_nodes(proto)))


def diff(
    float_model: Any, quantized: Any, data: Any = None, out: Path | None = None, force: bool = False, **overrides: Any
) -> onnxq.Difference:
    """Float and quantized model compared on ONNX Runtime."""
    overrides = {"engines": ["ort"], **overrides}
    return onnxq.diff(float_model, quantized, data, overrides=overrides, out=out, force=force)


def by_name(found: onnxq.Difference) -> dict[str, LayerDiff]:
    """The compared layers by the name of their tensor."""
    return {layer.name: layer for layer in found.layers}


def sqnr(layer: LayerDiff, run: str) -> float:
    """SQNR in dB of a layer in one run; NaN where that was not compared."""
    return next((error.sqnr_db for error in layer.accuracy if error.run == run), math.nan)


CHAIN = chain()
PAIRS = pairs(CHAIN)
