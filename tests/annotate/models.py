"""Models as the tools of the field write them, small."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def rng() -> np.random.Generator:
    """The same numbers at every call."""
    return np.random.default_rng(0)


def tensor(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(array), name)


def packed(name: str, dtype: int, values: np.ndarray) -> onnx.TensorProto:
    return helper.make_tensor(name, dtype, values.shape, values.ravel().tolist())


def model(nodes, inits, *, inputs=("x",), outputs=("y",), shape=(1, 4, 8, 8), opset=17, domains=(), functions=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, list("abcd")) for name in outputs],
        inits,
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    made = helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)
    onnx.checker.check_model(made)
    return made


def pair(source, made, scale, zero, *, names=("", ""), **attrs):
    q = helper.make_node("QuantizeLinear", [source, scale, zero], [f"{made}_q"], name=names[0], **attrs)
    dq = helper.make_node("DequantizeLinear", [f"{made}_q", scale, zero], [made], name=names[1], **attrs)
    return [q, dq]


def float_conv() -> onnx.ModelProto:
    """Two convolutions and a residual Add, for a quantizer to work on."""
    numbers = rng()
    w1, w2 = (numbers.normal(size=(4, 4, 3, 3)).astype(np.float32) for _ in range(2))
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="conv1", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv2", pads=[1] * 4),
        helper.make_node("Add", ["c2", "r1"], ["y"], name="add"),
    ]
    bias = numbers.normal(size=4).astype(np.float32)
    return model(nodes, [tensor("w1", w1), tensor("b1", bias), tensor("w2", w2)])


def two_widths() -> onnx.ModelProto:
    """u8 input pair, 4-bit float Clip in front of an s8 pair, int8 weight that uses 4 bits, int32 bias, output pair."""
    levels = rng().integers(-7, 8, size=(4, 4, 3, 3)).astype(np.int8)
    levels.flat[:2] = (-7, 7)
    nodes = [
        *pair("x", "xd", "xs", "xz", names=("in_q", "in_dq")),
        helper.make_node("DequantizeLinear", ["w_quantized", "ws", "wz"], ["wd"], name="w_dq", axis=0),
        helper.make_node("DequantizeLinear", ["b_quantized", "bs"], ["bd"], name="b_DequantizeLinear", axis=0),
        helper.make_node("Conv", ["xd", "wd", "bd"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Clip", ["c", "lo", "hi"], ["cc"], name="c/Clip"),
        *pair("cc", "cd", "cs", "cz", names=("c/QuantizeLinear", "c/DequantizeLinear")),
        helper.make_node("Relu", ["cd"], ["y_float"], name="relu"),
        *pair("y_float", "y", "xs", "xz", names=("out_q", "out_dq")),
    ]
    inits = [
        tensor("xs", np.float32(0.02)),
        tensor("xz", np.uint8(128)),
        tensor("w_quantized", levels),
        tensor("ws", np.array([0.1, 0.2, 0.05, 0.3], np.float32)),
        tensor("wz", np.zeros(4, np.int8)),
        tensor("b_quantized", rng().integers(-900, 900, size=4).astype(np.int32)),
        tensor("bs", np.array([0.002, 0.004, 0.001, 0.006], np.float32)),
        tensor("lo", np.float32(np.float32(0.3) * -8)),
        tensor("hi", np.float32(np.float32(0.3) * 7)),
        tensor("cs", np.float32(0.3)),
        tensor("cz", np.int8(0)),
    ]
    return model(nodes, inits)


def qcdq(low: int = -7, high: int = 7) -> onnx.ModelProto:
    """Brevitas' form: a Clip on integers between Q and DQ, and between a stored weight and its DQ."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("Clip", ["xq", "lo", "hi"], ["xc"]),
        helper.make_node("DequantizeLinear", ["xc", "s", "z"], ["xd"]),
        helper.make_node("Clip", ["w_int", "wlo", "whi"], ["wc"]),
        helper.make_node("DequantizeLinear", ["wc", "ws", "wz"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    inits = [
        tensor("s", np.float32(0.1)),
        tensor("z", np.int8(0)),
        tensor("lo", np.int8(low)),
        tensor("hi", np.int8(high)),
        tensor("wlo", np.int8(-1)),
        tensor("whi", np.int8(1)),
        tensor("w_int", rng().integers(-1, 2, size=(8, 4)).astype(np.int8)),
        tensor("ws", np.full(4, 0.2, np.float32)),
        tensor("wz", np.zeros(4, np.int8)),
    ]
    return model(nodes, inits)


def sub_byte() -> onnx.ModelProto:
    """INT4 per channel, UINT4 per block, and a float8 pair, opset 21."""
    nodes = [
        helper.make_node("DequantizeLinear", ["a_int", "as"], ["ad"], name="a/DequantizeLinear", axis=1),
        helper.make_node("MatMul", ["x", "ad"], ["m"], name="m1"),
        helper.make_node("DequantizeLinear", ["b_int", "bs", "bz"], ["bd"], axis=0, block_size=4),
        helper.make_node("MatMul", ["m", "bd"], ["n"], name="m2"),
        helper.make_node("QuantizeLinear", ["n", "fs"], ["nq"], output_dtype=TensorProto.FLOAT8E4M3FN),
        helper.make_node("DequantizeLinear", ["nq", "fs"], ["y"]),
    ]
    inits = [
        packed("a_int", TensorProto.INT4, rng().integers(-8, 8, size=(8, 8))),
        tensor("as", np.linspace(0.1, 0.8, 8, dtype=np.float32)),
        packed("b_int", TensorProto.UINT4, rng().integers(0, 16, size=(8, 8))),
        tensor("bs", np.full((2, 8), 0.5, np.float32)),
        packed("bz", TensorProto.UINT4, np.full((2, 8), 7)),
        tensor("fs", np.float32(1.0)),
    ]
    return model(nodes, inits, opset=21)


def branches() -> onnx.ModelProto:
    """An If whose bodies quantize: one a tensor of its own, one a tensor captured from outside."""

    def body(name: str, nodes: list, out: str) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, list("abcd"))])

    then = body("t", [*pair("x", "xd", "s", "z"), helper.make_node("Neg", ["xd"], ["t_out"])], "t_out")
    inner = [helper.make_node("Abs", ["x"], ["a"]), *pair("a", "e_out", "s", "z")]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["cond"]),
        helper.make_node("If", ["cond"], ["y"], name="If_0", then_branch=then, else_branch=body("e", inner, "e_out")),
    ]
    inits = [tensor("s", np.float32(0.1)), tensor("z", np.uint8(3)), tensor("zero", np.float32(0))]
    return model(nodes, inits)


def dedicated() -> onnx.ModelProto:
    """One tensor, a pair for each reader, nodes unnamed; in the domain com.microsoft with 16 bits."""

    def own(made: str) -> list[onnx.NodeProto]:
        nodes = pair("x", made, "s", "z")
        for node in nodes:
            node.domain = "com.microsoft"
        return nodes

    nodes = [
        *own("x1"),
        *own("x2"),
        helper.make_node("Relu", ["x1"], ["r"], name="relu"),
        helper.make_node("Add", ["r", "x2"], ["y"], name="add"),
    ]
    return model(nodes, [tensor("s", np.float32(0.1)), tensor("z", np.uint16(9))], domains=("com.microsoft",))


def in_function() -> onnx.ModelProto:
    """Pairs inside a model-local function that is called twice."""
    function = helper.make_function(
        "local", "FakeQuant", ["a", "fs", "fz"], ["b"], pair("a", "b", "fs", "fz"), [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("FakeQuant", ["x", "s", "z"], ["m"], domain="local", name="first"),
        helper.make_node("FakeQuant", ["m", "s", "z"], ["y"], domain="local", name="second"),
    ]
    inits = [tensor("s", np.float32(0.1)), tensor("z", np.int8(0))]
    return model(nodes, inits, domains=("local",), functions=[function])


def relu6(high: float) -> onnx.ModelProto:
    """A Clip of the network itself in front of a u8 pair with scale 6/255."""
    nodes = [
        helper.make_node("Clip", ["x", "lo", "hi"], ["c"], name="relu6"),
        *pair("c", "cd", "s", "z", names=("q", "dq")),
        helper.make_node("Neg", ["cd"], ["y"], name="neg"),
    ]
    inits = [
        tensor("lo", np.float32(0)),
        tensor("hi", np.float32(high)),
        tensor("s", np.float32(6 / 255)),
        tensor("z", np.uint8(0)),
    ]
    return model(nodes, inits)


def modelopt() -> onnx.ModelProto:
    """ModelOpt's and torch's form: the weight is still float in front of its pair, names end in _Output and numbers."""
    w = rng().normal(size=(4, 4, 1, 1)).astype(np.float32)
    scale = (np.abs(w).max(axis=(1, 2, 3)) / 127).astype(np.float32)
    nodes = [
        *pair("x", "x_DequantizeLinear_Output", "s", "z", names=("QuantizeLinear_3", "DequantizeLinear_4")),
        *pair("w", "w_dq_5", "ws", "wz", names=("QuantizeLinear_6", "DequantizeLinear_7"), axis=0),
        helper.make_node("Conv", ["x_DequantizeLinear_Output", "w_dq_5"], ["y"], name="Conv_0"),
    ]
    inits = [tensor("s", np.float32(0.1)), tensor("z", np.int8(0)), tensor("w", w), tensor("ws", scale)]
    return model(nodes, [*inits, tensor("wz", np.zeros(4, np.int8))])


def lone_nodes() -> onnx.ModelProto:
    """A quantize node nobody dequantizes, and a scale computed at run time."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("QuantizeLinear", ["x", "m", "z"], ["xq"], name="q"),
        helper.make_node("Cast", ["xq"], ["y"], to=TensorProto.FLOAT, name="cast"),
    ]
    return model(nodes, [tensor("z", np.uint8(0))])
