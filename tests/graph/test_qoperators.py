"""Operators on integers in the place of pairs: what ONNX Runtime answers with them, and what stays as it is."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxq.graph import name_nodes
from onnxq.graph.qoperators import write_qoperators
from tests.graph.kit import compute
from tests.networks import count_ops

RNG = np.random.default_rng(0)
BYTES = np.uint8


class Net:
    """Pairs and operators, one after the other."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def const(self, name: str, value) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attrs) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{output}/{op}", **attrs))
        return output

    def pair(self, x: str, scale: float = 0.05, zero: int = 128, kind: type = BYTES) -> str:
        names = [self.const(f"{x}/scale", np.float32(scale)), self.const(f"{x}/zero", kind(zero))]
        self.add("QuantizeLinear", [x, *names], f"{x}/q")
        return self.add("DequantizeLinear", [f"{x}/q", *names], f"{x}/dq")

    def end(self, x: str, scale: float = 0.05, zero: int = 128, kind: type = BYTES) -> None:
        """The result: x behind a pair."""
        self.add("Identity", [self.pair(x, scale, zero, kind)], "y")

    def weight(self, name: str, shape: tuple[int, ...], axis: int | None) -> str:
        codes = RNG.integers(-60, 60, shape).astype(np.int8)
        count = () if axis is None else (shape[axis],)
        names = [self.const(f"{name}/q", codes), self.const(f"{name}/scale", np.full(count, 0.01, np.float32)),
                 self.const(f"{name}/zero", np.zeros(count, np.int8))]  # fmt: skip
        return self.add("DequantizeLinear", names, name, **({} if axis is None else {"axis": axis}))

    def bias(self, name: str, count: int, scale: float) -> str:
        codes = self.const(f"{name}/q", RNG.integers(-900, 900, count).astype(np.int32))
        scales = self.const(f"{name}/scale", np.full(count, scale, np.float32))
        return self.add("DequantizeLinear", [codes, scales], name, axis=0)

    def build(self, x_shape: tuple[int, ...]) -> onnx.ModelProto:
        shapes = {"x": x_shape, "y": None}
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        graph = helper.make_graph(self.nodes, "g", values[:1], values[1:], self.tensors)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return name_nodes(onnx.shape_inference.infer_shapes(proto))


def check(net: Net, x_shape: tuple[int, ...], *kernels: str, step: float = 0.05) -> onnx.ModelProto:
    """The rewritten net, which has these operators and answers as before, within a step of the output."""
    proto = net.build(x_shape)
    done = write_qoperators(proto)
    onnx.checker.check_model(done)
    counts = count_ops(done)
    assert {kernel: counts[kernel] for kernel in kernels} == dict(Counter(kernels))
    x = RNG.uniform(-4, 4, x_shape).astype(np.float32)
    np.testing.assert_allclose(*(compute(one, {"x": x})[0] for one in (done, proto)), atol=1.01 * step)
    return done


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_convolutions(axis, kind) -> None:
    net = Net()
    x = net.pair("x", zero=0 if kind is np.int8 else 128, kind=kind)
    net.add("Conv", [x, net.weight("w", (8, 3, 3, 3), axis), net.bias("b", 8, 0.05 * 0.01)], "c", pads=[1] * 4)
    net.add("Relu", ["c"], "r")
    net.end("r", 0.05, -128 if kind is np.int8 else 0, kind)
    done = check(net, (1, 3, 6, 6), "QLinearConv", "QuantizeLinear", "DequantizeLinear")
    assert not {"Conv", "Relu"} & {*count_ops(done)}
    assert [node.name for node in done.graph.node if node.op_type == "QLinearConv"] == ["c/Conv"]


def test_an_activation_that_the_type_does_not_end_with_keeps_its_operator() -> None:
    for scale, fits in ((0.05, False), (2 / 255, True)):
        net = Net()
        net.add("Conv", [net.pair("x"), net.weight("w", (8, 3, 1, 1), 0)], "c")
        net.add("Clip", ["c", net.const("lo", np.float32(0)), net.const("hi", np.float32(2))], "r")
        net.end("r", scale, 0)
        assert count_ops(check(net, (1, 3, 4, 4), step=scale))["QLinearConv"] == fits


@pytest.mark.parametrize("axis", [None, 0])
def test_a_bias_in_float_is_rounded(axis) -> None:
    net = Net()
    bias = net.const("b", RNG.standard_normal(8).astype(np.float32))
    net.add("Conv", [net.pair("x"), net.weight("w", (8, 3, 1, 1), axis), bias], "c")
    net.end("c", 0.1)
    check(net, (1, 3, 4, 4), "QLinearConv", step=0.1)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(behind, transposed) -> None:
    net = Net()
    weight = net.weight("w", (5, 8) if transposed else (8, 5), 0 if transposed else 1)
    out = net.add(
        "Gemm", [net.pair("x"), weight, net.bias("b", 5, 0.05 * 0.01)], "c" if behind else "y", transB=transposed
    )
    if behind:
        net.end(out, 0.1)
    check(net, (4, 8), "QGemm", step=0.1)


@pytest.mark.parametrize(("behind", "kernel"), [(True, "QLinearMatMul"), (False, "MatMulIntegerToFloat")])
def test_matmul(behind, kernel) -> None:
    net = Net()
    out = net.add("MatMul", [net.pair("x"), net.weight("w", (8, 5), 1)], "c" if behind else "y")
    if behind:
        net.end(out, 0.1)
    check(net, (4, 8), kernel, step=0.1)


@pytest.mark.parametrize(("op", "kernel", "count", "attrs"), [
    ("Add", "QLinearAdd", 2, {}), ("Mul", "QLinearMul", 2, {}), ("Concat", "QLinearConcat", 2, {"axis": 1}),
    ("GlobalAveragePool", "QLinearGlobalAveragePool", 1, {}), ("LeakyRelu", "QLinearLeakyRelu", 1, {"alpha": 0.1}),
    ("AveragePool", "QLinearAveragePool", 1, {"kernel_shape": [2, 2]}), ("Sigmoid", "QLinearSigmoid", 1, {}),
    ("Softmax", "QLinearSoftmax", 1, {"axis": 1}),
])  # fmt: skip
def test_other_operators(op, kernel, count, attrs) -> None:
    net = Net()
    x = net.pair("x")
    inputs = [x, net.pair(net.add("Neg", [x], "n"), 0.06)][:count]
    net.end(net.add(op, inputs, "o", **attrs), 0.1, 100)
    check(net, (1, 3, 4, 4), kernel, step=0.1)


def test_where() -> None:
    net = Net()
    x = net.pair("x")
    flags = net.const("flags", np.arange(48).reshape(1, 3, 4, 4) % 3 == 0)
    net.add("Where", [flags, x, net.pair(net.add("Neg", [x], "n"), 0.06)], "o")
    net.end("o", 0.1, 100)
    check(net, (1, 3, 4, 4), "QLinearWhere", step=0.1)


def test_bytes_move_where_both_sides_mean_the_same() -> None:
    for scale, moved in ((0.05, True), (0.06, False)):
        net = Net()
        net.add("MaxPool", [net.pair("x")], "p", kernel_shape=[2, 2])
        net.add("Transpose", [net.pair("p", scale)], "t", perm=[0, 2, 3, 1])
        net.end("t", scale)
        done = check(net, (1, 3, 4, 4), *(["QuantizeLinear"] if moved else ["QuantizeLinear"] * 2), step=scale)
        assert count_ops(done)["DequantizeLinear"] == (1 if moved else 2)


def test_what_no_operator_takes_stays() -> None:
    net = Net()
    # A bias that is computed, and scales of a weight along its inputs.
    bias = net.add("Neg", [net.const("b", np.ones(3, np.float32))], "n")
    net.add("Conv", [net.pair("x"), net.weight("w", (3, 3, 1, 1), 0), bias], "c")
    net.add("Conv", [net.pair("c"), net.weight("v", (3, 3, 1, 1), 1)], "d")
    net.end("d")
    proto = net.build((1, 3, 4, 4))
    assert write_qoperators(proto) is proto
