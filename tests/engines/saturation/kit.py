"""Files of several tools whose weights can overflow 16-bit sums, and the exact search for inputs that do it."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

from onnxq.runtime import Session
from tests.codes.kit import model as parse
from tests.networks import add_arrays
from tests.numerics.reference import multiply_saturating
from tests.pipeline.models import Reader

Shape = tuple[int, ...]


def model(nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, Any]], outputs: list[str], arrays: dict[str, Any],
          opset: int = 17) -> onnx.ModelProto:  # fmt: skip
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, results)
    add_arrays(graph, **arrays)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    # Outputs get their shapes, which the checker asks for.
    shaped = onnx.shape_inference.infer_shapes(proto)
    del shaped.graph.value_info[:]
    return shaped


_CONV = "Conv <pads=[1,1,1,1]>"
_LAYERS = {"w1": (16, 3, 3, 3), "b1": (16,), "w2": (16, 1, 3, 3), "w3": (16, 33), "w4": (10, 33), "b4": (10,)}


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _LAYERS.items()}


def float_net() -> onnx.ModelProto:
    """Conv, depthwise Conv, MatMul, Gemm."""
    body = f"""g (float[N,3,9,9] x) => (float[N,10] y) {{
        [conv] c = {_CONV}(x, w1, b1) [relu] r = Relu(c)
        [depthwise] d = Conv <group=16, pads=[1,1,1,1]>(r, w2) [relu2] s = Relu(d)
        [pool] p = GlobalAveragePool(s) [flat] f = Flatten(p)
        [matmul] m = MatMul(f, w3) [relu3] t = Relu(m) [gemm] y = Gemm <transB=1>(t, w4, b4) }}"""
    return parse(body, **_weights())


def wide_net() -> onnx.ModelProto:
    """Convolutions that are worth their pairs."""
    rng, arrays = np.random.default_rng(2), {}
    for k, (inputs, outputs) in enumerate(((3, 32), (32, 64), (64, 64), (64, 32))):
        arrays[f"w{k}"] = (rng.standard_normal((outputs, inputs, 3, 3)) / (3 * inputs**0.5)).astype(np.float32)
    body = f"""g (float[1,3,24,24] x) => (float[1,32,24,24] y) {{
        c0 = {_CONV}(x, w0) r0 = Relu(c0) c1 = {_CONV}(r0, w1) r1 = Relu(c1)
        c2 = {_CONV}(r1, w2) r2 = Relu(c2) y = {_CONV}(r2, w3) }}"""
    return parse(body, **arrays)


def samples(count: int = 6) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 3, 9, 9)).astype(np.float32)


TOOLS = ("qdq", "qoperator", "int8-activations", "dynamic", "model-optimizer")


def by_tool(tool: str, folder: Path) -> onnx.ModelProto:
    """`float_net` as a tool quantizes it."""
    if tool == "model-optimizer":
        return model_optimizer()
    source, target = folder / "float.onnx", folder / f"{tool}.onnx"
    onnx.save(float_net(), source)
    if tool == "dynamic":
        quantize_dynamic(source, target, weight_type=QuantType.QInt8)
    else:
        form = QuantFormat.QOperator if tool == "qoperator" else QuantFormat.QDQ
        signed = QuantType.QInt8 if tool == "int8-activations" else QuantType.QUInt8
        quantize_static(
            source, target, Reader(samples()), quant_format=form, per_channel=True, activation_type=signed,
            weight_type=QuantType.QInt8,
        )  # fmt: skip
    return onnx.load(target)


def model_optimizer(*, activations: bool = False) -> onnx.ModelProto:
    """As TensorRT's tools write them: symmetric int8 everywhere, float weights with a whole pair, float biases.

    activations: with the Relus, in front of whose int8 pairs ONNX Runtime computes in float.
    """
    relu, arrays = "Relu" if activations else "Identity", _weights()
    for name in ("x", "r", "f", "t", "z"):
        arrays |= {f"{name}_s": np.float32(0.2 if name == "z" else 0.02), f"{name}_z": np.int8(0)}
    for name, axis in (("w1", 0), ("w2", 0), ("w3", 1), ("w4", 0)):
        largest = np.abs(arrays[name]).max(axis=tuple(k for k in range(arrays[name].ndim) if k != axis))
        arrays |= {f"{name}_s": largest / np.float32(127), f"{name}_z": np.zeros(largest.shape, np.int8)}

    def pair(name: str, axis: int | None = None, out: str = "") -> str:
        attrs = "" if axis is None else f"<axis={axis}>"
        quantized = f"{name}_q = QuantizeLinear{attrs}({name}, {name}_s, {name}_z)"
        return f"{quantized} {out or f'{name}_d'} = DequantizeLinear{attrs}({name}_q, {name}_s, {name}_z)"

    body = f"""g (float[N,3,9,9] x) => (float[N,10] y) {{
        {pair("x")} {pair("w1", 0)} [conv] c = {_CONV}(x_d, w1_d, b1) [relu] r = {relu}(c)
        {pair("r")} {pair("w2", 0)} [depthwise] d = Conv <group=16, pads=[1,1,1,1]>(r_d, w2_d) [relu2] s = {relu}(d)
        [pool] p = GlobalAveragePool(s) [flat] f = Flatten(p)
        {pair("f")} {pair("w3", 1)} [matmul] m = MatMul(f_d, w3_d) [relu3] t = {relu}(m)
        {pair("t")} {pair("w4", 0)} [gemm] z = Gemm <transB=1>(t_d, w4_d, b4) {pair("z", out="y")} }}"""
    return parse(body, **arrays)


def rows_by_search(rows: np.ndarray) -> int:
    """How many of the rows [rows, K] of int8 weights some input overflows, found by trying inputs.

    The largest levels where weights are positive make the largest sums, and so for negative ones; all 255 besides.
    """
    count = 0
    for row in rows:
        tried = np.stack([np.where(row > 0, 255, 0), np.where(row < 0, 255, 0), np.full(row.shape, 255)])
        x, w = tried.astype(np.uint8), row[:, None].astype(np.int8)
        count += bool((multiply_saturating(x, w) != x.astype(np.int64) @ w.astype(np.int64)).any())
    return count


def stored_rows(op: str, weight: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    """A weight as [rows, K] in the order in which kernels add: taps slowest, channels fastest."""
    if "Conv" in op:
        return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)
    return weight if transposed else weight.T


def product(
    op: str, x: Shape, w: Shape, *, kind: Any = np.uint8, zero: int = 77, quantized: bool = False, **attrs: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """One product between pairs. quantized: its result too, which ONNX Runtime's Conv kernel asks for."""
    rng = np.random.default_rng(0)
    axis = 0 if op == "Conv" or attrs.get("transB") else 1
    rows = w[axis] if len(w) > 1 else 1
    scale = rng.uniform(0.005, 0.02, rows).astype(np.float32) if len(w) > 1 else np.float32(0.01)
    arrays: dict[str, Any] = {
        "xs": np.float32(0.03), "xz": kind(zero), "ws": scale, "wz": np.zeros(np.shape(scale), np.int8),
        "w": (rng.choice([1, 1, -1], w) * rng.integers(40, 128, w)).astype(np.int8),
        "ys": np.float32(0.5), "yz": kind(0 if kind is np.int8 else 128),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=axis),
        helper.make_node(op, ["xd", "wd"], ["c" if quantized or op == "Conv" else "y"], name="product", **attrs),
    ]
    outputs = ["y"]
    if quantized or op == "Conv":
        nodes.append(helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["yq"]))
        nodes.append(helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]))
        outputs = ["y"] if quantized else ["c", "y"]
    return model(nodes, {"x": (TensorProto.FLOAT, x)}, outputs, arrays), arrays


def levels(x: np.ndarray, arrays: dict[str, Any]) -> np.ndarray:
    """The bytes that the product reads: raw uint8, int8 data moved up by 128."""
    zero = arrays["xz"]
    low, high = (-128, 127) if zero.dtype == np.int8 else (0, 255)
    found = np.clip(np.rint(x / arrays["xs"]) + int(zero), low, high)
    return (found - low).astype(np.uint8)


@cache
def this_cpu_saturates() -> bool:
    """True where a product with two large weights comes out wrong with ONNX Runtime's optimizations on."""
    body = "g (uint8[1,2] x) => (float[1,1] y) { i = MatMulInteger(x, w) y = Cast <to=1>(i) }"
    proto = parse(body, w=np.full((2, 1), 127, np.int8))
    return float(Session(proto).run({"x": np.full((1, 2), 255, np.uint8)})["y"][0, 0]) != 2 * 255 * 127
