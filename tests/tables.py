"""Models with tables of embeddings."""

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import onnxq
from tests.networks import parse_text

ROWS, WIDTH = 300, 48


def make_table(rows: int = ROWS, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.standard_normal((rows, 1)))
    return np.asarray(rng.standard_normal((rows, width)) * sizes, np.float32)


def model(body: str, out: str = "float[A,B,C] y", more: str = "", **tables: np.ndarray) -> onnx.ModelProto:
    """A model of `ids`, and `more` inputs."""
    proto = parse_text(f"g (int64[N,S] ids{more}) => ({out}) {{ {body} }}", **tables)
    onnx.checker.check_model(proto)
    return proto


def words(rows: int = ROWS, width: int = WIDTH) -> onnx.ModelProto:
    """One lookup and an activation behind it."""
    return model("e = Gather(w, ids) y = Relu(e)", w=make_table(rows, width))


def tokens(count: int = 8, rows: int = ROWS, length: int = 7) -> dict[str, np.ndarray]:
    """Samples."""
    return {"ids": np.random.default_rng(1).integers(-rows, rows, (count, 1, length))}


def quantize(proto: onnx.ModelProto, data: Any = None, config: str = "ort-int8", **overrides: Any) -> onnxq.Result:
    """The model quantized at effort fast, or as overrides say."""
    settings = {"effort": "fast", "latency": False, **overrides}
    return onnxq.quantize(proto, tokens() if data is None else data, config, overrides=settings)


def ops(graph: onnx.GraphProto) -> list[str]:
    """Its operators, those of bodies behind their node."""
    found = []
    for node in graph.node:
        found.append(node.op_type)
        for attribute in node.attribute:
            found += ops(attribute.g) if attribute.type == onnx.AttributeProto.GRAPH else []
    return found


def held(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Its initializers."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
