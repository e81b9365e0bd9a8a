"""A small network with one of each kind of product that OpenVINO reads integers in, quantized once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_engine
from tests.codes.kit import model

needs_openvino = pytest.mark.skipif(not find_engine("openvino").installed, reason="openvino is not installed")
_SHAPES = {
    "w0": (16, 3, 3, 3), "w1": (32, 16, 1, 1), "w2": (32, 1, 3, 3), "w3": (32, 32, 1, 1), "w4": (32, 32, 1, 1),
    "w5": (32, 10),
}  # fmt: skip


@cache
def make_net() -> onnx.ModelProto:
    """A stem, a depthwise block with a residual sum, x * Sigmoid(x), a pool and a linear layer; every node is named."""
    rng, weights = np.random.default_rng(0), {}
    for name, shape in _SHAPES.items():
        fan = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        weights[name] = (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)
    text = """g (float[1,3,16,16] x) => (float[1,10] y) {
        [stem] s = Conv<pads=[1,1,1,1]>(x, w0) [stem_relu] sr = Relu(s) [expand] e = Conv(sr, w1)
        [expand_relu] er = Relu(e) [depthwise] d = Conv<group=32, pads=[1,1,1,1]>(er, w2) [depthwise_relu] dr = Relu(d)
        [project] p = Conv(dr, w3) [sum] r = Add(er, p) [swish] h = Conv(r, w4) [gate] hg = Sigmoid(h)
        [product] hs = Mul(h, hg) [pool] a = GlobalAveragePool(hs) [flat] f = Flatten(a) [linear] y = MatMul(f, w5) }"""
    return model(text, **weights)


@cache
def make_samples() -> tuple[dict[str, np.ndarray], ...]:
    """Some inputs of the network."""
    rng = np.random.default_rng(1)
    return tuple({"x": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(12))


@cache
def quantize_net() -> onnxq.Result:
    """Every product in integers, whatever the predicted times."""
    return quantize_all(make_net(), make_samples())


def quantize_all(net: onnx.ModelProto, samples: Sequence[dict[str, np.ndarray]], **overrides: object) -> onnxq.Result:
    """A network for OpenVINO with every product in integers."""
    settings = {"effort": "fast", "latency": False, "rules": [{"node": "*", "set": {"quantize": True}}]}
    return onnxq.quantize(net, list(samples), "openvino-int8", overrides=settings | overrides)
