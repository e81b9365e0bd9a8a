"""Operators of ONNX Runtime's optimizer become those that they were made of, with the same answers."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxq
from onnxq.config import Config
from onnxq.passes.base import RunContext
from onnxq.pipeline.prepared import load_state
from onnxq.runtime import Session
from tests.codes.kit import model

RNG = np.random.default_rng(0)
SHAPES = {"w": (4, 3, 3, 3), "m": (5, 8), "b": 4, "a": (8, 24), "c": 24, "q": (8, 8), "k": (1, 2, 3, 3), "g": 8}
CONSTANTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
CONSTANTS["mask"] = np.array([[1, 1, 0], [1, 0, 0]], np.int32)
IMAGE, ROWS = "float[1,3,6,6] x", "float[2,3,8] x, float[2,3,8] s"
CONV = "y = com.microsoft.FusedConv<activation = {}, pads = [1,1,1,1], kernel_shape = [3,3]>"
RELU = CONV.format('"Relu"')
CASES = {
    **{
        name: (IMAGE, f"{CONV.format(text)}(x, w, b)")
        for name, text in (
            ("Relu", '"Relu"'),
            ("Sigmoid", '"Sigmoid"'),
            ("Tanh", '"Tanh"'),
            ("LeakyRelu", '"LeakyRelu", activation_params = [0.2]'),
            ("HardSigmoid", '"HardSigmoid", activation_params = [0.3, 0.4]'),
            ("Clip", '"Clip", activation_params = [0.0, 1.5]'),
        )
    },
    "sum": (IMAGE, f"z = Conv<pads = [1,1,1,1]>(x, w) {RELU}(x, w, b, z)"),
    "Gemm": (
        "float[3,8] x",
        'y = com.microsoft.FusedGemm<activation = "LeakyRelu", activation_alpha = 0.3, transB = 1>(x, m)',
    ),
    "MatMul": (ROWS, "y = com.microsoft.FusedMatMul<alpha = 0.5, transB = 1>(x, m)"),
    "MatMul of data": (ROWS, "y = com.microsoft.FusedMatMul<transA = 1>(x, s)"),
    "QuickGelu": (ROWS, "y = com.microsoft.QuickGelu<alpha = 1.5>(x)"),
    "swish": (ROWS, "y = com.microsoft.QuickGelu<alpha = 1.0>(x)"),
    "Gelu": (ROWS, "y = com.microsoft.Gelu(x)"),
    "BiasGelu": (ROWS, "y = com.microsoft.BiasGelu(x, g)"),
    "Attention": (ROWS, "y = com.microsoft.Attention<num_heads = 2>(x, a, c)"),
    "Attention of a mask": (ROWS, "y = com.microsoft.Attention<num_heads = 4, scale = 0.3>(x, a, c, mask)"),
    "causal": (ROWS, "y = com.microsoft.Attention<num_heads = 2, unidirectional = 1>(x, a, c)"),
    "sizes": (ROWS, "y = com.microsoft.Attention<num_heads = 2, qkv_hidden_sizes = [10, 10, 4]>(x, a, c)"),
    "joined": (ROWS, "j = Concat<axis = 1>(q, q, q) y = com.microsoft.Attention<num_heads = 2>(x, j, c)"),
    "added": (ROWS, "y = com.microsoft.Attention<num_heads = 2>(x, a, c, e, e, k)"),
    "ends": (
        "float[2,3] r",
        """n = Abs(r) i = Cast<to = 6>(n) h, z = com.microsoft.EmbedLayerNormalization(i, e, m, m, e, g, g, mask)
        y = com.microsoft.Attention<num_heads = 4>(h, a, c, z)""",
    ),
    "FastGelu": (ROWS, "y = com.microsoft.FastGelu(x, g)"),
    "FastGelu alone": (ROWS, "y = com.microsoft.FastGelu(x)"),
    "SkipLayerNormalization": (ROWS, "y = com.microsoft.SkipLayerNormalization<epsilon = 0.001>(x, s, g, g, g)"),
    "chain": (
        ROWS,
        """y1, e1, e2, t = com.microsoft.SkipLayerNormalization(x, s, g, g)
        y2, e3, e4, u = com.microsoft.SkipLayerNormalization(y1, t, g, g, g) y = Mul(y2, u)""",
    ),
}


def write_out(net: onnx.ModelProto) -> onnx.ModelProto:
    """The net as prepared for an engine that fuses nothing of this again."""
    return load_state(net, RunContext(config=Config(target="trt"))).model


def make_net(name: str) -> onnx.ModelProto:
    inputs, body = CASES[name]
    rank = ",".join("ABCD"[: 4 if inputs == IMAGE else 2 if name == "Gemm" else 3])
    used = {key: value for key, value in CONSTANTS.items() if f"{key}," in body or f"{key})" in body}
    net = model(f"g ({inputs}) => (float[{rank}] y) {{ {body} }}", 17, **used)
    for node in net.graph.node:
        # The text has no names that are left out.
        for names in (node.input, node.output):
            names[:] = ["" if name.startswith("e") else name for name in names]
    net.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return net


@pytest.mark.parametrize("name", CASES)
def test_answers_stay(name: str) -> None:
    net = make_net(name)
    x = {
        value.name: RNG.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in net.graph.input
    }
    after = write_out(net)
    beyond = {node.op_type for node in after.graph.node if node.domain}
    assert beyond <= {"MultiHeadAttention", "EmbedLayerNormalization"}
    expected, got = (Session(each, optimize=False).run(x)["y"] for each in (net, after))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_transposed_axes_are_known_behind_what_is_written_out() -> None:
    """Nobody infers the shapes that a FusedConv has."""
    body = f"{RELU.replace('y =', 'c =')}(x, w, b) f = Flatten(c) y = com.microsoft.FusedMatMul<transA = 1>(f, f)"
    net = model(f"g ({IMAGE}) => (float[A,B] y) {{ {body} }}", 17, w=CONSTANTS["w"], b=CONSTANTS["b"])
    net.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert not [node.op_type for node in write_out(net).graph.node if node.domain]


def test_what_onnxruntime_optimized_is_read(tmp_path: Path) -> None:
    body = (
        """c = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(c) d = Conv<pads = [1,1,1,1]>(x, w) t = Add(d, r) y = Relu(t)"""
    )
    net = model(f"g ({IMAGE}) => (float[1,4,6,6] y) {{ {body} }}", 17, w=CONSTANTS["w"], b=CONSTANTS["b"])
    Session(net, layout=False, save_optimized=tmp_path / "o.onnx")
    optimized = onnx.load(tmp_path / "o.onnx")
    assert {node.op_type for node in optimized.graph.node} >= {"FusedConv"}
    after = write_out(optimized)
    assert {node.op_type for node in after.graph.node} <= {"Conv", "Relu", "Add"}
    x = {"x": RNG.standard_normal((1, 3, 6, 6)).astype(np.float32)}
    np.testing.assert_allclose(Session(after).run(x)["y"], Session(net).run(x)["y"], rtol=1e-5, atol=1e-5)


def test_weights_in_blocks_of_a_cpu_are_refused(tmp_path: Path) -> None:
    body = "c = Conv<pads = [1,1,1,1]>(x, w, b) y = Relu(c)"
    w = RNG.standard_normal((32, 3, 3, 3)).astype(np.float32)
    net = model(f"g ({IMAGE}) => (float[1,32,6,6] y) {{ {body} }}", 17, w=w, b=np.zeros(32, np.float32))
    Session(net, save_optimized=tmp_path / "o.onnx")
    x = {"x": RNG.standard_normal((4, 3, 6, 6)).astype(np.float32)}
    report = onnxq.quantize(tmp_path / "o.onnx", x, overrides={"latency": False}).report
    (refusal,) = report.refusals
    assert refusal.code == "R101"
    assert "quantize the model before it is optimized" in refusal.reason
    # Not that int8 would not pay, or that weights alone would make the file smaller.
    (alarm,) = report.alarms()
    assert "refused" in alarm
    assert "weight-only" not in alarm
