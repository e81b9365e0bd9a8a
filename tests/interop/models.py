"""A small residual network as PyTorch exports it, with a calibration cache as TensorRT would write it."""

from collections.abc import Mapping

import numpy as np
import onnx

from onnxq.interop import tensorrt
from onnxq.interop.base import TensorScale
from onnxq.plan import Plan
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.networks import parse_text

BODY = """g (float[N,16,8,8] input) => (float[M,10] logits) <int64[2] rows = {-1, 16}> {
    c1 = Conv <pads=[1,1,1,1]>(input, w0, b0) n1 = BatchNormalization(c1, gamma, beta, mean, var) r1 = Relu(n1)
    c2 = Conv <pads=[1,1,1,1]>(r1, w1, b1) s = Add(c2, r1) r2 = Relu(s)
    p = AveragePool <kernel_shape=[4,4], strides=[4,4]>(r2) f = Reshape(p, rows) logits = Gemm <transB=1>(f, w2, b2)
}"""
OWN = "(Unnamed Layer* 12) [Constant]_output"


def write_cache(scales: Mapping[str, float | np.float32]) -> str:
    """The text of TensorRT's cache with these scales by tensor name, float32 bit for bit."""
    return tensorrt.write_cache([TensorScale(name, np.float32(scale)) for name, scale in scales.items()]).decode()


def collect_scales(plan: Plan) -> dict[str, np.float32]:
    """The scales of a plan's activations, by tensor name."""
    sites = [site for site in plan.sites if site.role not in (Role.WEIGHT, Role.BIAS) and site.qparams is not None]
    return {site.quantized_tensor.name: np.float32(site.qparams.scale) for site in sites}


def network(seed: int = 0) -> onnx.ModelProto:
    """Conv-BN-ReLU, a residual Conv, pooling and a classifier of four places each."""
    rng = np.random.default_rng(seed)
    tensors = {
        "w0": rng.standard_normal((16, 16, 3, 3)) / 12,
        "b0": rng.standard_normal(16) / 8,
        "gamma": rng.uniform(0.5, 1.5, 16),
        "beta": rng.standard_normal(16) / 4,
        "mean": rng.standard_normal(16) / 4,
        "var": rng.uniform(0.5, 1.5, 16),
        "w1": rng.standard_normal((16, 16, 3, 3)) / 12,
        "b1": rng.standard_normal(16) / 8,
        "w2": rng.standard_normal((10, 16)),
        "b2": rng.standard_normal(10),
    }
    proto = parse_text(BODY, **{name: value.astype(np.float32) for name, value in tensors.items()})
    for node in proto.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.checker.check_model(proto)
    return proto


def samples(count: int = 12, seed: int = 3) -> dict[str, np.ndarray]:
    """Inputs for `network`."""
    return {"input": np.random.default_rng(seed).standard_normal((count, 16, 8, 8)).astype(np.float32)}


def ranges(proto: onnx.ModelProto) -> dict[str, np.float32]:
    """Scale of every tensor of the network: greatest magnitude over `samples`, divided by 127."""
    tapped = onnx.ModelProto.FromString(proto.SerializeToString())
    there = {value.name for value in tapped.graph.output}
    names = [name for node in proto.graph.node for name in node.output if name not in there]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    feeds = samples()
    values = feeds | Session(tapped, optimize=False, threads=1).run(feeds)
    return {name: np.float32(np.abs(value).max() / 127) for name, value in values.items()}


def cache(scales: dict[str, np.float32]) -> str:
    """The cache, with a line for a layer of TensorRT's own."""
    return write_cache({**scales, OWN: np.float32(0.00025)})
