"""Operators on integers become float ones between pairs, whose answers are the same."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

from onnxq.annotate import find_operators
from onnxq.graph import GraphIndex, name_nodes
from onnxq.graph.integer_operators import read_integer_operators
from onnxq.graph.integer_products import read_integer_products
from onnxq.runtime import Session
from tests.codes.kit import model
from tests.cpus.kernels import cpu_saturates
from tests.pipeline.models import Reader

SAMPLES = np.random.default_rng(1).standard_normal((8, 8, 12, 12)).astype(np.float32)
_WEIGHTS = {"w0": (8, 8, 3, 3), "b0": (8,), "w1": (8, 8, 3, 3), "b1": (8,), "w2": (12, 24), "b2": (12,), "w3": (12, 10)}


def every_operator() -> onnx.ModelProto:
    """A network with all that onnxruntime's quantizer has an operator on integers for."""
    rng = np.random.default_rng(0)
    values = {name: (rng.standard_normal(shape) / 9).astype(np.float32) for name, shape in _WEIGHTS.items()}
    shift = np.float32(0.3)
    body = """g (float[N,8,12,12] x) => (float[N,10] y) {
        a = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(a) p = MaxPool <kernel_shape=[2,2], strides=[2,2]>(r)
        c = Conv <pads=[1,1,1,1]>(p, w1, b1) l = LeakyRelu <alpha=0.1>(c) s = Sigmoid(c) m = Mul(l, s) d = Add(m, p)
        k = Concat <axis=1>(d, l, m) q = AveragePool <kernel_shape=[2,2], strides=[2,2]>(k) v = GlobalAveragePool(q)
        f = Flatten(v) z = Gemm <transB=1, alpha=0.5>(f, w2, b2) o = MatMul(z, w3) e = Softmax(o)
        t = Transpose <perm=[1,0]>(e) u = Transpose <perm=[1,0]>(t) y = Mul(u, shift)
    }"""
    return model(body, shift=shift, **values)


def write_operators(folder: Path, **options: Any) -> onnx.ModelProto:
    """`every_operator` as onnxruntime's quantizer writes it."""
    source, target = folder / "m.onnx", folder / "q.onnx"
    onnx.save(every_operator(), source)
    if options:
        quantize_static(source, target, Reader(SAMPLES), quant_format=QuantFormat.QOperator, **options)
    else:
        quantize_dynamic(source, target, op_types_to_quantize=["Conv", "MatMul", "Gemm"])
    return onnx.load(target)


def read(proto: onnx.ModelProto) -> onnx.ModelProto:
    pairs = read_integer_operators(read_integer_products(name_nodes(proto)))
    onnx.checker.check_model(pairs)
    return pairs


def answer(proto: onnx.ModelProto, x: np.ndarray = SAMPLES) -> np.ndarray:
    return np.asarray(Session(proto, optimize=False).run({"x": x})["y"])


@pytest.mark.recent_ort
@pytest.mark.parametrize(
    "options",
    [
        # Where the CPU adds up in 16 bits, the operators themselves are right on weights of 7 bits alone.
        {
            "activation_type": QuantType.QUInt8,
            "weight_type": QuantType.QInt8,
            "per_channel": True,
            "reduce_range": cpu_saturates(),
        },
        {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8},
        {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8},
        {},
    ],
    ids=["uint8", "int8", "uint8 weights", "dynamic"],
)
def test_answers_are_those_of_the_operators(tmp_path: Path, options: dict[str, Any]) -> None:
    integers = write_operators(tmp_path, **options)
    assert len(find_operators(GraphIndex(name_nodes(integers)))) >= 4
    pairs = read(integers)
    assert not [op for op in find_operators(GraphIndex(pairs)) if op.op != "DynamicQuantizeLinear"]
    exact, found = answer(integers), answer(pairs)
    # A value halfway between two levels may fall to either side, of the result too: one of ten classes in .3 steps.
    assert np.square(found - exact).sum() < 1e-6 * np.square(exact).sum()
    kinds = {node.op_type for node in every_operator().graph.node} - ({"Relu"} if options else set())
    assert kinds <= {node.op_type for node in pairs.graph.node}


def test_what_moves_integers_moves_floats() -> None:
    body = """g (float[N,4,6] x) => (float[P,5,6] y, int64[N,4] first) {
        q = QuantizeLinear(x, s, z) t = Transpose <perm=[0,2,1]>(q) p = Pad(t, pads, z) u = Transpose <perm=[0,2,1]>(p)
        a, b = Split <axis=1, num_outputs=2>(u) c = Concat <axis=1>(a, b) r = Gather <axis=1>(c, rows)
        y = DequantizeLinear(r, s, z) d = DequantizeLinear(q, s, z) first = ArgMax <axis=2, keepdims=0>(d)
    }"""
    places = {"pads": np.array([0, 0, 0, 0, 0, 2]), "rows": np.array([0, 3, 5, 1, 2])}
    proto = model(body, opset=18, s=np.float32(0.02), z=np.uint8(77), **places)
    pairs = read_integer_operators(name_nodes(proto))
    x = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(answer(pairs, x), answer(proto, x))
    index = GraphIndex(pairs)
    moved = [node for node in index.nodes if node.op_type in ("Transpose", "Pad", "Split", "Gather")]
    assert len(moved) == 5
    assert all(index.maker(node).op_type == "DequantizeLinear" for node in moved)  # type: ignore[union-attr]


def test_rows_of_a_table_are_gathered_in_float() -> None:
    rng = np.random.default_rng(0)
    body = """g (int64[N] x) => (float[N,8] y) {
        r = Gather(table, x) f = DequantizeLinear(r, s, z)
        y = Add(f, f)
    }"""
    table = rng.integers(-60, 60, (20, 8)).astype(np.int8)
    proto = model(body, table=table, s=np.float32(0.1), z=np.int8(3))
    pairs = read_integer_operators(name_nodes(proto))
    x = np.arange(20)
    np.testing.assert_array_equal(answer(pairs, x), answer(proto, x))
    index = GraphIndex(pairs)
    (gather,) = [node for node in index.nodes if node.op_type == "Gather"]
    assert index.maker(gather).op_type == "DequantizeLinear"


def test_codes_biases_and_names_stay(tmp_path: Path) -> None:
    integers = write_operators(
        tmp_path, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, per_channel=True
    )
    pairs = read(integers)
    index = GraphIndex(pairs)
    names = {node.name for node in name_nodes(integers).graph.node if node.op_type.startswith("QLinear")}
    assert names <= {node.name for node in index.nodes}
    for node in (node for node in index.nodes if node.op_type == "Conv"):
        data, weight, bias = (index.input_value(index.maker(node, k), 1) for k in range(3))
        np.testing.assert_array_equal(bias, data * weight)
    kept = {numpy_helper.to_array(one).tobytes() for one in pairs.graph.initializer}
    assert {numpy_helper.to_array(one).tobytes() for one in integers.graph.initializer if len(one.dims) > 1} <= kept
