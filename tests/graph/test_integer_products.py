"""Products of dynamically quantized data: from pairs to operators and back, with the same answers and fused kernels."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxq.graph import name_nodes, verify_graph
from onnxq.graph.integer_products import read_integer_products, write_integer_products
from onnxq.runtime import Session, optimize_graph
from tests.graph.kit import model
from tests.networks import count_ops

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 8)).astype(np.float32)


def make_pairs(op: str, scales: int = 6, *, transposed: bool = False) -> onnx.ModelProto:
    """x through a dynamic pair, times a weight [8, 6] of stored integers; Gemm: of one matrix, with a bias."""
    rank = "float[N, 8]" if op == "Gemm" else "float[N, T, 8]"
    call = f"Gemm <transB = {int(transposed)}> (xd, wd, b)" if op == "Gemm" else "MatMul(xd, wd)"
    text = f"""agraph ({rank} x) => (float[N] y) {{
        [x_DynamicQuantizeLinear] xq, xs, xz = DynamicQuantizeLinear(x) [xd_node] xd = DequantizeLinear(xq, xs, xz)
        [w_DequantizeLinear] wd = DequantizeLinear <axis = {0 if transposed else 1}> (wq, ws, wz)
        [product] y = {call}
    }}"""
    shape = (6, 8) if transposed else (8, 6)
    tensors: dict[str, NDArray[np.generic]] = {
        "wq": RNG.integers(-60, 60, shape).astype(np.int8),
        "ws": RNG.uniform(0.01, 0.02, scales).astype(np.float32),
        "wz": np.zeros(scales, np.int8),
        "b": RNG.standard_normal(6).astype(np.float32),
    }
    single = {name: value.reshape(()) for name, value in tensors.items() if value.size == 1}
    proto = model(text, 13, **tensors | single)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def run(proto: onnx.ModelProto, x: NDArray[np.float32], *, optimize: bool = False) -> NDArray[np.float32]:
    return Session(proto, optimize=optimize).run({"x": x})["y"]


@pytest.mark.parametrize("scales", [1, 6])
@pytest.mark.parametrize(("op", "transposed"), [("MatMul", False), ("Gemm", False), ("Gemm", True)])
def test_operators_compute_what_pairs_say_and_fuse(op: str, transposed: bool, scales: int) -> None:
    pairs = make_pairs(op, scales, transposed=transposed)
    x = X[0] if op == "Gemm" else X
    operators = write_integer_products(pairs)
    verify_graph(operators)
    assert count_ops(operators)["DequantizeLinear"] == 0
    assert next(node.name for node in operators.graph.node if node.op_type == "MatMulInteger") == "product"
    np.testing.assert_allclose(run(operators, x), run(pairs, x), rtol=1e-5, atol=1e-5)
    fused = count_ops(optimize_graph(operators))
    # Bias and scales are in the kernel.
    assert fused == {"DynamicQuantizeMatMul": 1}
    np.testing.assert_allclose(run(operators, x, optimize=True), run(pairs, x), rtol=1e-5, atol=1e-5)
    back = read_integer_products(operators)
    verify_graph(back)
    np.testing.assert_allclose(run(back, x), run(pairs, x), rtol=1e-5, atol=1e-5)
    assert {"DynamicQuantizeLinear", "DequantizeLinear"} <= set(count_ops(back))
    assert not {"MatMulInteger", "Cast", "Mul"} & set(count_ops(back))
    assert "product" in {node.name for node in back.graph.node}


def test_models_without_such_products_stay_as_they_are() -> None:
    plain = name_nodes(model("g (float[N] x) => (float[N] y) { y = Relu(x) }", 13))
    assert write_integer_products(plain) is plain
    assert read_integer_products(plain) is plain


@pytest.mark.parametrize("per_channel", [True, False])
def test_files_of_onnxruntime_are_read(tmp_path: Path, per_channel: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    text = "g (float[N, T, 8] x) => (float[N, T, 6] y) { [product] m = MatMul(x, w) [add] y = Add(m, b) }"
    weights = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in (("w", (8, 6)), ("b", (6,)))}
    onnx.save(model(text, 13, **weights), tmp_path / "m.onnx")
    # Seven bits: sums of eight overflow on CPUs without VNNI.
    options = {"per_channel": per_channel, "weight_type": QuantType.QInt8, "reduce_range": True}
    quantize_dynamic(tmp_path / "m.onnx", tmp_path / "q.onnx", **options)
    theirs = name_nodes(onnx.load(tmp_path / "q.onnx"))
    back = read_integer_products(theirs)
    verify_graph(back)
    assert count_ops(back) == {"DynamicQuantizeLinear": 1, "DequantizeLinear": 2, "MatMul": 1, "Add": 1}
    np.testing.assert_allclose(run(back, X), run(theirs, X), rtol=1e-5, atol=1e-5)
