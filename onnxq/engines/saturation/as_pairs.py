"""Integer operators as float ones between pairs: the same answers within rounding, in a form that can be added to.

QLinearConv      DequantizeLinear of data, weight and int32 bias, Conv, QuantizeLinear
QLinearMatMul    the same with MatMul
QGemm            the same with Gemm; no QuantizeLinear where it writes float
MatMulInteger    DequantizeLinear with scale 1, MatMul, Round, Cast to int32 (float32 holds integers up to 2^24 exactly)
MatMulIntegerToFloat, DynamicQuantizeMatMul (behind a DynamicQuantizeLinear)    DequantizeLinear, MatMul, Add
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.graph import Editor, GraphIndex, NodeRef, ensure_opset, name_nodes
from onnxq.graph.light import M

# DequantizeLinear has an axis from here on.
_OPSET = 13


class NodeWriter:
    """Writes nodes of one scope, and their constants, under names that begin with a prefix."""

    def __init__(self, editor: Editor[Any], scope: str, prefix: str) -> None:
        self.editor, self.scope, self.prefix = editor, scope, prefix

    def add(self, op: str, inputs: list[str], output: str = "", *, name: str = "", **attrs: Any) -> str:
        """A node; returns its output."""
        made = output or self.editor.fresh(f"{self.prefix}/{op}")
        name = name or self.editor.fresh(f"{self.prefix}/{op}/node")
        self.editor.insert_node(self.scope, op, inputs, [made], name=name, attrs=attrs)
        return made

    def constant(self, value: Any) -> str:
        """A new constant; returns its name."""
        name = self.editor.fresh(f"{self.prefix}/constant")
        return self.editor.add_initializer(self.scope, name, np.asarray(value))


def replace_integer_operators(proto: M, wanted: frozenset[str]) -> tuple[M, dict[str, str]]:
    """A copy in which the nodes named are float operators between pairs; those of other operators stay as they are.

    Returns it with the names of the float operators and of the nodes they stand for. Raises ModelError for a model of
    an opset below 13 that cannot be upgraded.
    """
    index = GraphIndex(proto)
    if not any(node.name in wanted and node.op_type in _WRITERS for node in index.nodes):
        return proto, {}
    proto = name_nodes(ensure_opset(proto, _OPSET))
    index, editor = GraphIndex(proto), Editor(proto)
    names: dict[str, str] = {}
    for node in index.nodes:
        # No float operator of ONNX takes channels last.
        if node.name in wanted and node.op_type in _WRITERS and not node.attrs.get("channels_last", 0):
            editor.remove_node(node.name)
            _WRITERS[node.op_type](_OperatorWriter(editor, index, node, names))
    return editor.export(), names


class _OperatorWriter(NodeWriter):
    """Writes the replacement of one node. names: the float operator's is added."""

    def __init__(self, editor: Editor[Any], index: GraphIndex, node: NodeRef, names: dict[str, str]) -> None:
        super().__init__(editor, node.scope, node.name)
        self.index, self.node, self.names = index, node, names

    def input(self, position: int) -> str:
        """The name of an input, "" for one left out."""
        return self.node.inputs[position] if position < len(self.node.inputs) else ""

    def product(self, op: str, inputs: list[str], output: str = "") -> str:
        """The float operator."""
        kept = {key: value for key, value in self.node.attrs.items() if key != "channels_last" and op != "MatMul"}
        name = self.editor.fresh(f"{self.node.name}/{op}")
        self.names[name] = self.node.name
        return self.add(op, inputs, output, name=name, **kept)

    def inputs(self, *positions: int) -> list[str]:
        """The names of several inputs."""
        return [self.input(position) for position in positions]

    def dequantize(self, inputs: list[str], axis: int = 1) -> str:
        """A DequantizeLinear of (tensor, scale, zero point or ""). axis: where scales lie when there are several."""
        return self.add("DequantizeLinear", [name for name in inputs if name], axis=axis)

    def quantize(self, tensor: str, scale: str, zero: str) -> None:
        """The QuantizeLinear that makes the node's own output."""
        self.add("QuantizeLinear", [tensor, scale, *([zero] if zero else [])], self.node.outputs[0])

    def ones(self, zero: str) -> str:
        """A scale of 1 in the shape of a zero point."""
        # DequantizeLinear wants both of one shape, and MatMulInteger may have a zero point for each column.
        found = self.index.resolve_tensor(zero, self.node.scope)
        shape = (self.index.find_shape(found) or ()) if found is not None else ()
        return self.constant(np.ones([dim if isinstance(dim, int) else 1 for dim in shape], np.float32))

    def last_axis(self, tensor: str) -> int:
        """The last axis of a constant."""
        found = self.index.resolve_tensor(tensor, self.node.scope)
        return len(self.index.find_shape(found) or (0, 0)) - 1 if found is not None else 1


def _write_conv(w: _OperatorWriter) -> None:
    data, weight = w.dequantize(w.inputs(0, 1, 2)), w.dequantize(w.inputs(3, 4, 5), axis=0)
    bias = [w.dequantize([w.input(8), w.add("Mul", w.inputs(1, 4))], axis=0)] if w.input(8) else []
    w.quantize(w.product("Conv", [data, weight, *bias]), w.input(6), w.input(7))


def _write_matmul(w: _OperatorWriter) -> None:
    data = w.dequantize(w.inputs(0, 1, 2))
    weight = w.dequantize(w.inputs(3, 4, 5), axis=w.last_axis(w.input(3)))
    w.quantize(w.product("MatMul", [data, weight]), w.input(6), w.input(7))


def _write_gemm(w: _OperatorWriter) -> None:
    data = w.dequantize(w.inputs(0, 1, 2))
    weight = w.dequantize(w.inputs(3, 4, 5), axis=0 if w.node.attrs.get("transB", 0) else 1)
    bias = []
    if w.input(6):
        # The bias counts in steps of the product times alpha, and Gemm's alpha does not reach it.
        alpha = w.constant(np.float32(w.node.attrs.get("alpha", 1.0)))
        scale = w.add("Mul", [w.add("Mul", w.inputs(1, 4)), alpha])
        bias = [w.dequantize([w.input(6), scale], axis=w.last_axis(w.input(6)))]
    made = w.product("Gemm", [data, weight, *bias], "" if w.input(7) else w.node.outputs[0])
    if w.input(7):
        w.quantize(made, w.input(7), w.input(8))


def _write_matmul_integer(w: _OperatorWriter) -> None:
    data = w.dequantize([w.input(0), w.ones(w.input(2)), w.input(2)])
    weight = w.dequantize([w.input(1), w.ones(w.input(3)), w.input(3)])
    rounded = w.add("Round", [w.product("MatMul", [data, weight])])
    w.add("Cast", [rounded], w.node.outputs[0], to=TensorProto.INT32)


def _write_matmul_integer_to_float(w: _OperatorWriter) -> None:
    _write_matmul_and_bias(w, w.dequantize(w.inputs(0, 2, 4)), (1, 3, 5), w.input(6))


def _write_dynamic_matmul(w: _OperatorWriter) -> None:
    made = [w.editor.fresh(f"{w.node.name}/{name}") for name in ("quantized", "scale", "zero_point")]
    name = w.editor.fresh(f"{w.node.name}/DynamicQuantizeLinear")
    w.editor.insert_node(w.node.scope, "DynamicQuantizeLinear", [w.input(0)], made, name=name)
    _write_matmul_and_bias(w, w.dequantize(made), (1, 2, 3), w.input(4))


def _write_matmul_and_bias(w: _OperatorWriter, data: str, weight: tuple[int, int, int], bias: str) -> None:
    tensor, scale, zero = w.inputs(*weight)
    made = w.dequantize([tensor, scale, zero], axis=w.last_axis(tensor))
    product = w.product("MatMul", [data, made], "" if bias else w.node.outputs[0])
    if bias:
        w.add("Add", [product, bias], w.node.outputs[0])


_WRITERS: Mapping[str, Callable[[_OperatorWriter], None]] = {
    "QLinearConv": _write_conv,
    "QLinearMatMul": _write_matmul,
    "QGemm": _write_gemm,
    "MatMulInteger": _write_matmul_integer,
    "MatMulIntegerToFloat": _write_matmul_integer_to_float,
    "DynamicQuantizeMatMul": _write_dynamic_matmul,
}
