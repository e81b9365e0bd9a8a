"""A network with a custom operator between its convolutions, and another on a constant."""

import numpy as np
import onnx

from tests.networks import parse_text


def network(opset: int = 17) -> onnx.ModelProto:
    """Conv, Swell, Relu, Conv, and the sum with Swell of a constant."""
    rng = np.random.default_rng(0)
    tensors = {
        "w0": rng.standard_normal((32, 3, 3, 3)) / 5,
        "b0": rng.standard_normal(32) / 8,
        "w1": rng.standard_normal((32, 32, 3, 3)) / 17,
        "b1": rng.standard_normal(32) / 8,
        "bias": rng.standard_normal((32, 1, 1)),
    }
    arrays = {name: value.astype(np.float32) for name, value in tensors.items()}
    text = """g (float[N,3,16,16] x) => (float[M,32,16,16] y) {
        c0 = Conv <pads=[1,1,1,1]>(x, w0, b0) s = example.ops.Swell(c0) r = Relu(s)
        c1 = Conv <pads=[1,1,1,1]>(r, w1, b1) shift = example.ops.Swell(bias) y = Add(c1, shift)
    }"""
    return parse_text(text, "example.ops", opset=opset, **arrays)
