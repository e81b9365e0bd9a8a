"""Operators on stored integers, of any tool, as float operators between pairs: the same answers within rounding.

QLinearConv, QGemm …   DequantizeLinear of each operand and of the int32 bias, Conv, QuantizeLinear of integer results
MatMulInteger          DequantizeLinear with scale 1, MatMul, Round, Cast to int32: float32 holds them up to 2^24
Reshape, MaxPool …     of integers: DequantizeLinear, the same on floats, QuantizeLinear on the same numbers

Codes, scales and zero points stay in the tensors that hold them, and a node keeps its name.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.graph.base import DEQUANTIZE, DYNAMIC, MOVING_OPS, QUANTIZE, NodeRef
from onnxq.graph.convert import ensure_opset
from onnxq.graph.editing.editor import Editor
from onnxq.graph.index import GraphIndex
from onnxq.graph.integer_products import name_source, read_integer_products
from onnxq.graph.light import M
from onnxq.graph.names import name_nodes
from onnxq.graph.qoperators import INTEGER_OPERATORS, MISSING_SCALE, IntegerOperator
from onnxq.sites import Names, NameSet, TensorId

# DequantizeLinear has an axis from here on.
_OPSET = 13
# Attributes that the float operators do not have.
_OWN = ("channels_last", "opset")
_FREE_OF_ATTRIBUTES = ("Add", "MatMul", "Mul", "Sigmoid", "Where")
# They move integers, or choose among them, which gives what floats give; a Pad has a value of its own.
_MOVES = MOVING_OPS | {"Concat", "Pad"}


@dataclass(eq=False)
class NodeWriter:
    """Writes nodes of one scope, and their constants, under names that begin with a prefix."""

    editor: Editor[Any]
    scope: str
    prefix: str

    def add(
        self, op: str, inputs: list[str], output: str = "", *, name: str = "", **attrs: Any
    ) -> str:
        """A node; returns its output."""
        made = output or self.editor.fresh(f"{self.prefix}/{op}")
        name = name or self.editor.fresh(f"{self.prefix}/{op}/node")
        self.editor.insert_node(self.scope, op, inputs, [made], name=name, attrs=attrs)
        return made

    def constant(self, value: Any) -> str:
        """A new constant; returns its name."""
        return self.editor.add_constant(self.scope, f"{self.prefix}/constant", value)


def read_integer_operators(proto: M, wanted: NameSet | None = None) -> M:
    """A copy in which operators on integers are float ones between pairs; the model itself without any.

    wanted: names of nodes; by default all but those that give out sums, whose numbers stand elsewhere, and the nodes
    that move integers, and products on scales of each run, too. Raises ModelError for a model of an opset below 13 that
    cannot be upgraded.
    """
    if wanted is None:
        proto = read_integer_products(proto)
    index = GraphIndex(proto)
    if not any(
        _is_wanted(node, wanted) or (wanted is None and _moves_integers(index, node))
        for node in index.nodes
    ):
        return proto
    proto = name_nodes(ensure_opset(proto, _OPSET))
    index = GraphIndex(proto)
    editor = Editor(proto)
    # Integers -> names of their scale and zero point.
    numbers = _find_tables(index) if wanted is None else {}
    for node in index.nodes:
        writer = _OperatorWriter(editor, index, node, numbers)
        if _is_wanted(node, wanted):
            writer.write(INTEGER_OPERATORS[node.op_type])
        elif node.op_type in (QUANTIZE, DYNAMIC):
            numbers[node.result] = (
                node.inputs[1:3] if node.op_type == QUANTIZE else node.outputs[1:3]
            )
        elif wanted is None and node.is_onnx(*_MOVES):
            writer.move()
    return editor.export()


def _is_wanted(node: NodeRef, wanted: NameSet | None) -> bool:
    form = INTEGER_OPERATORS.get(node.op_type)
    # No float operator of ONNX takes channels last.
    if form is None or node.attrs.get("channels_last", 0):
        return False
    return not form.sums if wanted is None else node.name in wanted


def _moves_integers(index: GraphIndex, node: NodeRef) -> bool:
    """True for a DequantizeLinear behind a node that moves integers which were quantized, or of a table."""
    moved = index.find_input(node) if node.op_type == DEQUANTIZE else None
    origin = index.find_origin(moved, _MOVES)
    maker = index.find_producer(origin)
    return origin != moved and (maker is None or maker.op_type in (QUANTIZE, DYNAMIC))


def _find_tables(index: GraphIndex) -> dict[TensorId, Names]:
    """Constant integers that are moved before they are dequantized, as rows of a table are, with their numbers."""
    found = {}
    for node in index.nodes:
        stored = index.find_input(node)
        scale = index.input_value(node, 1)
        origin = index.find_origin(stored, _MOVES) if node.op_type == DEQUANTIZE else None
        # Scales of channels lie along another axis there.
        single = scale is not None and scale.size == 1
        if single and origin is not None and origin != stored and index.is_constant(origin):
            found[origin] = node.inputs[1:3]
    return found


class _OperatorWriter(NodeWriter):
    """Writes the replacement of one node. numbers: of the integers that are known; those of its results are added."""

    def __init__(
        self,
        editor: Editor[Any],
        index: GraphIndex,
        node: NodeRef,
        numbers: dict[TensorId, Names],
    ) -> None:
        super().__init__(editor, node.scope, node.name)
        self.index = index
        self.node = node
        self.numbers = numbers

    def write(self, form: IntegerOperator) -> None:
        """Write the float operator of a form, and the pairs around it."""
        node = self.node
        reads = [self.inputs(read) for read in form.place_reads(len(node.inputs) // 3)]
        result = self.inputs(form.result)
        bias = self.inputs(form.bias)
        self.editor.remove_node(node.name)
        if form.dynamic:
            source = reads[0]
            parts = ("quantized", "scale", "zero_point")
            reads[0] = [self.editor.fresh(f"{node.name}/{part}") for part in parts]
            name = self.editor.fresh(f"{node.name}/{DYNAMIC}")
            self.editor.insert_node(self.scope, DYNAMIC, source, reads[0], name=name)
        operands = [
            self.dequantize(read, self.find_axis(form.op, read[0]) if k else 1)
            for k, read in enumerate(reads)
        ]
        if any(bias) and not form.float_bias:
            operands.append(
                self.dequantize([*bias, self.scale_bias(reads)], self.find_last_axis(bias[0]))
            )
        attrs = {} if form.op in _FREE_OF_ATTRIBUTES else node.attrs
        attrs = {key: value for key, value in attrs.items() if key not in _OWN}
        out = node.outputs[0]

        def write_float(output: str = "") -> str:
            return self.add(form.op, operands, output, name=node.name, **attrs)

        # The operator gives integers: Round takes the float rounding off its products.
        if form.sums:
            self.add("Cast", [self.add("Round", [write_float()])], out, to=int(TensorProto.INT32))
        elif any(result):
            self.quantize(write_float(self.editor.fresh(self.name_float(out))), out, result)
        elif form.float_bias and any(bias):
            self.add("Add", [write_float(), *bias], out)
        else:
            write_float(out)

    def move(self) -> None:
        """Let the node move floats, where the numbers of what it moves are known."""
        node = self.node
        moved = range(len(node.inputs)) if node.op_type == "Concat" else (0,)
        known = {
            self.numbers.get(source)
            for k in moved
            if (source := self.index.find_input(node, k)) is not None
        }
        numbers = known.pop() if len(known) == 1 else None
        if numbers is None:
            return
        # The value that a Pad puts in is an integer, too.
        for k in (*moved, 2) if node.op_type == "Pad" and node.name_input(2) else moved:
            self.editor.replace_input(
                node.make_edge(k), self.dequantize([node.inputs[k], *numbers], 1)
            )
        for k, out in enumerate(node.outputs):
            # The second output of a MaxPool is of indices.
            if out and not (k and node.op_type == "MaxPool"):
                made = self.editor.fresh(self.name_float(out))
                self.editor.replace_output(node.name, k, made)
                self.quantize(made, out, list(numbers))

    def inputs(self, positions: Any) -> list[str]:
        """The names of several inputs, "" for one left out."""
        given = dict(enumerate(self.node.inputs))
        return [
            self.ones(given.get(positions[-1], "")) if k == MISSING_SCALE else given.get(k, "")
            for k in positions
        ]

    def name_float(self, stored: str) -> str:
        """A name for the floats that integers stand for."""
        name = name_source(stored)
        return name if name != stored else f"{stored}/float"

    def dequantize(self, inputs: list[str], axis: int) -> str:
        """A DequantizeLinear of (tensor, scale, zero point or ""), or the tensor alone. axis: of several scales."""
        if len(inputs) == 1:
            return inputs[0]
        made = self.editor.fresh(f"{name_source(inputs[0])}/dequantized")
        return self.add(DEQUANTIZE, [name for name in inputs if name], made, axis=axis)

    def quantize(self, tensor: str, out: str, numbers: list[str]) -> None:
        """The QuantizeLinear that makes an output of integers."""
        self.numbers[TensorId(out, self.scope)] = tuple(numbers)
        self.add(QUANTIZE, [tensor, *filter(None, numbers)], out)

    def find_axis(self, op: str, weight: str) -> int:
        """The axis along which a weight has its scales, where it has several."""
        return (
            0
            if op == "Conv" or (op == "Gemm" and self.node.is_transposed)
            else self.find_last_axis(weight)
        )

    def find_last_axis(self, tensor: str) -> int:
        """The last axis of a constant."""
        shape = self.index.find_shape(self.index.resolve_tensor(tensor, self.scope)) or (0, 0)
        return max(len(shape) - 1, 0)

    def scale_bias(self, reads: list[list[str]]) -> str:
        """The scale of an int32 bias: that of data times that of the weight, and Gemm's alpha, which misses it."""
        scales = [self.index.resolve_tensor(read[1], self.scope) for read in reads]
        alpha = np.float32(self.node.attrs.get("alpha", 1.0))
        data, weight = map(self.index.find_constant, scales)
        if data is not None and weight is not None:
            return self.constant(data.reshape(()) * weight * alpha)
        scale = self.add("Mul", [read[1] for read in reads])
        return scale if alpha == 1 else self.add("Mul", [scale, self.constant(alpha)])

    def ones(self, zero: str) -> str:
        """A scale of 1 in the shape of a zero point."""
        # DequantizeLinear wants both of one shape, and MatMulInteger may have a zero point for each column.
        shape = self.index.find_shape(self.index.resolve_tensor(zero, self.scope)) or ()
        return self.constant(
            np.ones([dim if isinstance(dim, int) else 1 for dim in shape], np.float32)
        )
