"""Types of tensors in graphs that ONNX Runtime optimized."""

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.runtime import declare_types, optimize_graph
from onnxq.runtime.kernel_types import _read_type
from tests.codes.kit import model

TYPES = onnx.TensorProto


@pytest.fixture(scope="module")
def made() -> onnx.ModelProto:
    """Two convolutions quantized with int8 activations, and a branch behind them."""
    rng = np.random.default_rng(0)
    net = model(
        """g (float[N,8,9,9] x, bool c) => (float[N,16,9,9] y, float[M,K] z) {
            h = Conv <pads=[1,1,1,1]> (x, v) r = Relu(h) y = Conv <pads=[1,1,1,1]> (r, w)
            z = If (c) <then_branch = t () => (float[M,K] a) { a = Flatten(r) },
                        else_branch = e () => (float[M,K] b) { b = Flatten(y) }> }""",
        v=rng.standard_normal((16, 8, 3, 3)).astype(np.float32) / 8,
        w=rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 8,
    )
    samples = {"x": rng.standard_normal((8, 1, 8, 9, 9)).astype(np.float32), "c": np.array([True, False] * 4)}
    rules = [{"op": "Conv", "set": {"quantize": True}}]
    settings = {"effort": "fast", "latency": False, "activations.signed": True, "rules": rules}
    return onnxq.quantize(net, samples, overrides=settings).model


@pytest.mark.parametrize("layout", [True, False])
def test_every_tensor_of_an_int8_graph_has_its_type(made: onnx.ModelProto, layout: bool) -> None:
    optimized = optimize_graph(made, layout=layout)
    declare_types(optimized)
    types = {one.name: one.type.tensor_type.elem_type for one in optimized.graph.value_info}
    convs = [node for node in optimized.graph.node if node.op_type == "QLinearConv"]
    assert convs
    known = {**types, **{one.name: one.data_type for one in optimized.graph.initializer}}
    # ONNX Runtime makes uint8 of int8 activations where its kernels want it.
    assert all(known[name] in (TYPES.INT8, TYPES.UINT8) for node in convs for name in (node.input[0], *node.output))
    assert all(known[node.input[0]] == known[node.input[2]] for node in convs)


def test_prove_shows_the_types_of_kernels_with_int8_activations(made: onnx.ModelProto) -> None:
    proof = onnxq.prove(made, overrides={"engine": "ort"})
    kernels = [kernel for kernel in proof.kernels if kernel.kind == "QLinearConv"]
    assert kernels
    assert {tensor.dtype for one in kernels for tensor in (one.inputs[0], *one.outputs)} <= {"int8", "uint8"}


def test_types_are_read_by_the_names_of_onnx_runtime() -> None:
    assert [_read_type(f"tensor({name})") for name in ("float", "uint8", "int4")] == [1, TYPES.UINT8, TYPES.INT4]
    assert _read_type("seq(tensor(float))") == 0
