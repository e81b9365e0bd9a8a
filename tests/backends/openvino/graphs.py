"""A small network with one of each kind of product that OpenVINO reads integers in, quantized once."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import compose

import onnxq
from onnxq.backends import find_engine
from tests.codes.kit import model
from tests.passes.kit import read_by

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


# Nodes of networks that stand beside each other.
PRODUCTS = {"conv", "front", "beside", "behind", "product", "other"}


def quantize_beside(
    texts: Iterable[str], arrays: Mapping[str, np.ndarray], low: float = -3.0, opset: int = 17, **skip: list[str]
) -> onnxq.Result:
    """Networks beside each other in one, with their number before their names: OpenVINO starts longer than it runs.

    arrays: the initializers, of those that name them. low: samples are uniform from here to 3.
    """
    nets = [model(text, opset, **read_by(text, arrays)) for text in texts]
    first, *others = (compose.add_prefix(net, f"{k}_") for k, net in enumerate(nets))
    for other in others:
        for field in ("node", "initializer", "input", "output"):
            getattr(first.graph, field).extend(getattr(other.graph, field))
    for value in first.graph.output:
        value.type.tensor_type.ClearField("shape")
    rng, samples = np.random.default_rng(4), [{} for _ in range(8)]
    for value in first.graph.input:
        size = [dim.dim_value or {"N": 1}.get(dim.dim_param, 16) for dim in value.type.tensor_type.shape.dim]
        for sample in samples:
            sample[value.name] = rng.uniform(low, 3, size).astype(np.float32)
    return quantize_all(first, samples, **skip)


def check_part(result: onnxq.Result, k: int, refused: str) -> None:
    """Of the k-th network beside others, these products and no others are refused, and OpenVINO computes it well."""
    subjects = [refusal.subject.partition("_") for refusal in result.plan.refusals]
    assert {name for number, _, name in subjects if number == str(k)} & PRODUCTS == set(refused.split())
    outputs = [one for one in result.report.engines[0].outputs if one.name.startswith(f"{k}_")]
    assert outputs
    assert min(one.sqnr_db for one in outputs) > 25
