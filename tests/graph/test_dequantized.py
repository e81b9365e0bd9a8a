"""Rounded weights as floats: to the bit what ONNX Runtime makes of them, and nothing else changed."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxq.graph import GraphIndex, name_nodes, strip_weights, verify_graph
from onnxq.graph.integer_products import dequantize_weights
from onnxq.runtime import Session
from tests.graph.kit import copy, model

F = np.float32


def network() -> onnx.ModelProto:
    """Weights per tensor, per channel on two axes, in blocks; int32 biases, one of them an output; a pair."""
    text = """main (float[N, 6] x) => (float[N, 4] y, float[4] shown) {
          [q] xq = QuantizeLinear(x, xs, xz) [dq] xd = DequantizeLinear(xq, xs, xz)
          [w0] a = DequantizeLinear<axis = 0>(wq, s6, z6) [w1] b = DequantizeLinear<axis = 1>(wq, s4)
          [w2] c = DequantizeLinear(wq, s, z) [bias] d = DequantizeLinear<axis = 0>(bq, s4)
          [blocks] e = DequantizeLinear<axis = 0, block_size = 3>(wq, sb)
          [out] shown = DequantizeLinear<axis = 0>(bq, s4) [m0] p = MatMul(xd, a) [m1] r = MatMul(xd, b)
          [m2] t = Gemm(xd, c, d) [m3] u = MatMul(xd, e) [s0] v = Sum(p, r, t, u) [i] y = Identity(v) }"""
    rng = np.random.default_rng(0)
    held = {
        "xs": F(0.1), "xz": np.uint8(7), "wq": rng.integers(-128, 128, (6, 4)).astype(np.int8),
        "s6": rng.uniform(0.01, 1, 6).astype(F), "z6": rng.integers(-3, 4, 6).astype(np.int8),
        "s4": rng.uniform(0.01, 1, 4).astype(F), "s": F(0.3), "z": np.int8(5),
        "bq": rng.integers(-(2**30), 2**30, 4).astype(np.int32), "sb": rng.uniform(0.01, 1, (2, 4)).astype(F),
    }  # fmt: skip
    return name_nodes(model(text, 21, 10, **held))


def test_the_values_are_those_of_onnx_runtime_and_only_weights_change() -> None:
    proto = network()
    before = proto.SerializeToString(deterministic=True)
    shown = copy(proto)
    shown.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in "abcd")
    x = {"x": np.random.default_rng(1).standard_normal((3, 6)).astype(F)}
    wanted = Session(shown, optimize=False).run(x)
    done = dequantize_weights(proto)
    verify_graph(done)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in done.graph.initializer}
    for name in "abcd":
        np.testing.assert_array_equal(held[name].view(np.uint32), wanted[name].view(np.uint32))
    left = [node.name for node in GraphIndex(done).nodes if node.op_type == "DequantizeLinear"]
    assert left == ["dq", "blocks", "out"]
    assert "z6" not in held
    assert {"wq", "bq", "s4"} <= held.keys()
    got = Session(done, optimize=False).run(x)
    np.testing.assert_array_equal(got["shown"], wanted["shown"])
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-5, atol=1e-3)
    assert proto.SerializeToString(deterministic=True) == before
    again = Session(dequantize_weights(strip_weights(proto)), optimize=False)
    np.testing.assert_array_equal(again.run(x)["y"], got["y"])


def test_a_float_model_comes_back_as_it_is() -> None:
    proto = name_nodes(model("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
    assert dequantize_weights(proto) is proto


def test_what_a_body_still_reads_stays() -> None:
    body = "(float[6, 4] {0}) {{ {0} = DequantizeLinear(wq, s, z) }}"
    branches = f"then_branch = t () => {body.format('one')}, else_branch = e () => {body.format('two')}"
    text = f"""main (float[N, 6] x, bool c) => (float[N, 4] y) {{
          [w] a = DequantizeLinear(wq, s, z) [if] b = If <{branches}>(c) [m] p = MatMul(x, a) [n] r = MatMul(x, b)
          [add] y = Add(p, r)
        }}"""
    held = {"wq": np.arange(-12, 12, dtype=np.int8).reshape(6, 4), "s": F(0.3), "z": np.int8(5)}
    proto = name_nodes(model(text, 21, 10, **held))
    done = dequantize_weights(proto)
    assert [node.op_type for node in done.graph.node].count("DequantizeLinear") == 0
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 6)).astype(F), "c": np.array(True)}
    assert np.array_equal(Session(proto).run(feeds)["y"], Session(done).run(feeds)["y"])
