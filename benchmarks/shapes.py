#!/usr/bin/env python3
"""Networks of well-known shapes with random weights, for what depends on shapes alone: kernels and times.

    python benchmarks/shapes.py resnet50 resnet50.onnx resnet50.npz

The batch is free. Batch normalization is folded, ViT takes the mean of its tokens in the place of a class token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SAMPLES = 8
# Tokens of a sentence, words of the vocabulary.
TOKENS, WORDS = 128, 30522


class Net:
    """A graph that grows node by node, with weights that keep the size of values."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node; returns the name of its output."""
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, list(inputs), [name], name=f"{name}/{op}", **attributes)
        )
        return name

    def hold(self, value: np.ndarray) -> str:
        """A constant; returns its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def draw(self, *shape: int, fan: int = 0) -> str:
        """A random weight of a sum over `fan` values."""
        return self.hold((self.rng.standard_normal(shape) / np.sqrt(fan or 1e4)).astype(np.float32))

    def conv(
        self, x: str, made: int, read: int, kernel: int, stride: int = 1, *, relu: bool = True
    ) -> str:
        """A convolution with its bias, and Relu unless told otherwise."""
        weight = self.draw(made, read, kernel, kernel, fan=read * kernel**2 // (2 if relu else 1))
        pads = [(kernel - 1) // 2] * 4
        y = self.add("Conv", x, weight, self.draw(made), pads=pads, strides=[stride] * 2)
        return self.add("Relu", y) if relu else y

    def linear(self, x: str, read: int, made: int) -> str:
        """A MatMul and its bias."""
        return self.add(
            "Add", self.add("MatMul", x, self.draw(read, made, fan=read)), self.draw(made)
        )

    def norm(self, x: str, width: int) -> str:
        """A LayerNormalization."""
        ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)
        return self.add("LayerNormalization", x, self.hold(ones), self.hold(zeros), axis=-1)

    def attention(self, x: str, width: int, heads: int) -> str:
        """Self-attention with its output projection."""
        split = self.hold(np.array([0, -1, heads, width // heads]))
        query, key, value = (
            self.add("Reshape", self.linear(x, width, width), split) for _ in range(3)
        )
        query = self.add("Transpose", query, perm=[0, 2, 1, 3])
        key = self.add("Transpose", key, perm=[0, 2, 3, 1])
        value = self.add("Transpose", value, perm=[0, 2, 1, 3])
        scale = self.hold(np.float32(np.sqrt(heads / width)))
        weights = self.add(
            "Softmax", self.add("Mul", self.add("MatMul", query, key), scale), axis=-1
        )
        mixed = self.add("Transpose", self.add("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self.linear(
            self.add("Reshape", mixed, self.hold(np.array([0, -1, width]))), width, width
        )

    def feed_forward(self, x: str, width: int) -> str:
        """Two linear layers with GELU between."""
        h = self.linear(x, width, 4 * width)
        erf = self.add("Erf", self.add("Div", h, self.hold(np.float32(np.sqrt(2)))))
        gelu = self.add(
            "Mul",
            self.add("Mul", h, self.add("Add", erf, self.hold(np.float32(1)))),
            self.hold(np.float32(0.5)),
        )
        return self.linear(gelu, 4 * width, width)

    def save(self, path: str, x: onnx.ValueInfoProto, y: str, shape: list[Any]) -> None:
        """Write the model."""
        made = helper.make_tensor_value_info(y, TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, "shape", [x], [made], self.weights)
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
            path,
        )


def resnet50(path: str) -> np.ndarray:
    """ResNet-50 at 224×224; returns samples."""
    net, read = Net(), 64
    x = net.conv("x", 64, 3, 7, 2)
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(blocks):
            stride = first if k == 0 else 1
            h = net.conv(net.conv(x, width, read, 1), width, width, 3, stride)
            h = net.conv(h, 4 * width, width, 1, relu=False)
            skip = net.conv(x, 4 * width, read, 1, stride, relu=False) if k == 0 else x
            x, read = net.add("Relu", net.add("Add", h, skip)), 4 * width
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    y = net.add("Gemm", x, net.draw(2048, 1000, fan=2048), net.draw(1000))
    return _save_image_net(net, path, y)


def vit_b(path: str) -> np.ndarray:
    """ViT-B/16 at 224×224; returns samples."""
    net, width = Net(), 768
    x = net.add("Conv", "x", net.draw(width, 3, 16, 16, fan=768), net.draw(width), strides=[16, 16])
    x = net.add(
        "Transpose", net.add("Reshape", x, net.hold(np.array([0, width, -1]))), perm=[0, 2, 1]
    )
    x = net.add("Add", x, net.draw(196, width))
    for _ in range(12):
        x = net.add("Add", x, net.attention(net.norm(x, width), width, 12))
        x = net.add("Add", x, net.feed_forward(net.norm(x, width), width))
    x = net.add("ReduceMean", net.norm(x, width), axes=[1], keepdims=0)
    y = net.add("Gemm", x, net.draw(width, 1000, fan=width), net.draw(1000))
    return _save_image_net(net, path, y)


def _save_image_net(net: Net, path: str, y: str) -> np.ndarray:
    shape = ["N", 3, 224, 224]
    net.save(path, helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), y, ["N", 1000])
    return net.rng.standard_normal((SAMPLES, *shape[1:])).astype(np.float32)


def bert_base(path: str) -> np.ndarray:
    """BERT-base on 128 tokens, without a mask; returns samples."""
    net, width = Net(), 768
    x = net.add("Add", net.add("Gather", net.draw(WORDS, width), "x"), net.draw(TOKENS, width))
    x = net.norm(x, width)
    for _ in range(12):
        x = net.norm(net.add("Add", x, net.attention(x, width, 12)), width)
        x = net.norm(net.add("Add", x, net.feed_forward(x, width)), width)
    shape = ["N", TOKENS]
    net.save(path, helper.make_tensor_value_info("x", TensorProto.INT64, shape), x, [*shape, width])
    return net.rng.integers(0, WORDS, (SAMPLES, TOKENS))


SHAPES: dict[str, Callable[[str], np.ndarray]] = {
    "resnet50": resnet50,
    "vit_b": vit_b,
    "bert_base": bert_base,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("model", help="file to write, ONNX")
    parser.add_argument("data", help="file to write, .npz")
    arguments = parser.parse_args()
    np.savez(arguments.data, x=SHAPES[arguments.name](arguments.model))
