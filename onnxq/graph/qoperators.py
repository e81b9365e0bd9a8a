"""Operators on integers in the place of float ones between pairs: the form QOperator of onnxruntime.quantization.

    DequantizeLinear -> Conv [-> Relu, Clip] -> QuantizeLinear      QLinearConv
    DequantizeLinear -> MatMul                                      MatMulIntegerToFloat
    DequantizeLinear -> Reshape -> QuantizeLinear, equal numbers    Reshape

ONNX Runtime makes these operators of pairs when it loads a file; written out, they are there with its optimizations off
and in versions and providers that do not fuse. What no operator takes stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.arrays import Array, as_int64
from onnxq.graph.base import DEQUANTIZE, MICROSOFT, MOVING_OPS, QUANTIZE, NodeRef, NodeRefs
from onnxq.graph.editing.editor import Editor
from onnxq.graph.index import GraphIndex, find_opset
from onnxq.graph.light import M
from onnxq.graph.values import name_type
from onnxq.numerics import quantize
from onnxq.sites import Indices
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec

# The lowest and the highest value of each.
_BYTES: dict[int, tuple[int, int]] = {TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127)}


# In the place of a scale: 1.
MISSING_SCALE = -1


@dataclass(frozen=True)
class IntegerOperator:
    """Where an operator on integers has its parts, by the numbers of its inputs. op: the one on floats.

    reads: tensor, scale and zero point of each operand; a tensor alone is read as it is. result: scale and zero point;
    () where it is float. bias: in int32, or in float. repeats: there are as many operands as inputs for them.
    """

    op: str
    reads: tuple[Indices, ...]
    result: Indices = ()
    bias: Indices = ()
    float_bias: bool = False
    repeats: bool = False
    # It quantizes its data itself, or gives out the sums of its products.
    dynamic: bool = False
    sums: bool = False

    def place_reads(self, inputs: int) -> Sequence[Indices]:
        """The operands, each with its positions. inputs: how many the operator on floats has."""
        # QLinearConcat: scale and zero point of the result first, then three inputs for each part.
        parts = (tuple(range(k, k + 3)) for k in range(2, 2 + 3 * inputs, 3))
        return tuple(parts) if self.repeats else self.reads


# Positions of a tensor, its scale and its zero point.
_ALONE = ((0, 1, 2),)
_TWO = ((0, 1, 2), (3, 4, 5))
INTEGER_OPERATORS: Mapping[str, IntegerOperator] = {
    "QLinearConv": IntegerOperator("Conv", _TWO, (6, 7), (8,)),
    "QLinearMatMul": IntegerOperator("MatMul", _TWO, (6, 7)),
    "QGemm": IntegerOperator("Gemm", _TWO, (7, 8), (6,)),
    "QLinearConcat": IntegerOperator("Concat", (), (0, 1), repeats=True),
    "QLinearWhere": IntegerOperator("Where", ((0,), (1, 2, 3), (4, 5, 6)), (7, 8)),
    "MatMulIntegerToFloat": IntegerOperator(
        "MatMul", ((0, 2, 4), (1, 3, 5)), (), (6,), float_bias=True
    ),
    "DynamicQuantizeMatMul": IntegerOperator(
        "MatMul", ((0,), (1, 2, 3)), (), (4,), float_bias=True, dynamic=True
    ),
    "MatMulInteger": IntegerOperator(
        "MatMul", ((0, MISSING_SCALE, 2), (1, MISSING_SCALE, 3)), sums=True
    ),
    "QLinearAdd": IntegerOperator("Add", _TWO, (6, 7)),
    "QLinearMul": IntegerOperator("Mul", _TWO, (6, 7)),
    "QLinearSigmoid": IntegerOperator("Sigmoid", _ALONE, (3, 4)),
    "QLinearLeakyRelu": IntegerOperator("LeakyRelu", _ALONE, (3, 4)),
    "QLinearSoftmax": IntegerOperator("Softmax", _ALONE, (3, 4)),
    "QLinearAveragePool": IntegerOperator("AveragePool", _ALONE, (3, 4)),
    "QLinearGlobalAveragePool": IntegerOperator("GlobalAveragePool", _ALONE, (3, 4)),
}
# Operators of ONNX; the others are of ONNX Runtime.
_OF_ONNX = ("QLinearConv", "QLinearMatMul")
# The weight of these may have scales along its axis of output channels.
_WEIGHTED = ("Conv", "MatMul", "Gemm")
# Steps that an int32 bias holds.
_LARGEST = 2.0**31
# Kernels of these move bytes as they move floats. From opset 12 on, MaxPool takes them.
_MOVES = MOVING_OPS | {"Tile"}
_POOL_OPSET = 12
_SOFTMAX_OPSET = 13


@dataclass(frozen=True)
class _Pair:
    """Half a pair: the names of codes, scale and zero point ("" for none), their values, and the type of the codes."""

    names: tuple[str, str, str]
    scale: Array
    zero: Array
    dtype: int

    def equals(self, other: _Pair) -> bool:
        """True where the same codes mean the same values."""
        alike = self.dtype == other.dtype and self.scale.shape == other.scale.shape
        return alike and bool((self.scale == other.scale).all() and (self.zero == other.zero).all())


def write_qoperators(proto: M) -> M:
    """A copy with operators on integers wherever there is one for 8 bits; the model itself without any.

    Nodes keep their names, and tensors between them too.
    """
    index = GraphIndex(proto)
    editor = Editor(proto)
    writer = _QOperatorWriter(index, editor, find_opset(proto))
    if not [node for node in index.nodes if not node.domain and writer.replace(node)]:
        return proto
    return editor.finish()


@dataclass
class _QOperatorWriter:
    index: GraphIndex
    editor: Editor[Any]
    opset: int

    def replace(self, node: NodeRef) -> bool:
        """Write one node as an operator on integers; False where there is none for it."""
        if node.op_type in _MOVES:
            return self._move_codes(node)
        return self._write_kernel(node)

    def _move_codes(self, node: NodeRef) -> bool:
        source = self._read_half(self.index.maker(node, 0, DEQUANTIZE), node.scope)
        behind = [self._find_behind(node, k) for k in range(len(node.outputs))]
        results = [self._read_half(chain[-1], node.scope) if chain else None for chain in behind]
        if source is None or any(result is None or not source.equals(result) for result in results):
            return False
        # Interpolated values lie between the codes.
        if node.op_type == "Resize" and node.attrs.get("mode", "nearest") != "nearest":
            return False
        # Its second output holds places, which are no codes.
        if node.op_type == "MaxPool" and (self.opset < _POOL_OPSET or len(node.outputs) > 1):
            return False
        for k, chain in enumerate(behind):
            # The node makes the codes under the name that the QuantizeLinear gave them.
            self.editor.remove_node(chain[-1].name)
            self.editor.replace_output(node.name, k, chain[-1].outputs[0])
        self.editor.replace_input(node.make_edge(0), source.names[0])
        return True

    def _write_kernel(self, node: NodeRef) -> bool:
        kernels = [
            name
            for name, form in INTEGER_OPERATORS.items()
            if form.op == node.op_type and not (form.dynamic or form.sums)
        ]
        if not kernels:
            return False
        form = INTEGER_OPERATORS[kernels[0]]
        taken = (
            range(len(node.inputs))
            if form.repeats
            else [k for k, read in enumerate(form.reads) if len(read) > 1]
        )
        pairs = {
            k: self._read_half(self.index.maker(node, k, DEQUANTIZE), node.scope) for k in taken
        }
        halves = {k: pair for k, pair in pairs.items() if pair is not None}
        if len(halves) < len(taken) or not self._has_kernel(node, halves):
            return False
        chain = self._find_behind(node, 0)
        result = self._read_half(chain[-1], node.scope) if chain else None
        if result is None or not self._takes_result(chain, result, halves[taken[0]]):
            chain = ()
            result = None
        bias = self._find_bias(node, halves) if form.bias else ""
        # Only kernels of products write float.
        if bias is None or (result is None and node.op_type not in ("MatMul", "Gemm")):
            return False
        # Of a MatMul it is another kernel, behind the one that writes integers.
        name = kernels[-1 if result is None else 0]
        inputs = self._place_inputs(node, INTEGER_OPERATORS[name], halves, result, bias)
        # QGemm has no beta.
        attrs = {key: value for key, value in node.attrs.items() if key != "beta"}
        # The kernel asks which opset's Softmax it stands for: before 13 that flattens its input.
        attrs |= {"opset": self.opset} if node.op_type == "Softmax" else {}
        for old in chain:
            self.editor.remove_node(old.name)
        outputs = chain[-1].outputs if chain else node.outputs
        domain = "" if name in _OF_ONNX else MICROSOFT
        self.editor.replace_node(node, name, inputs, outputs, domain=domain, attrs=attrs)
        return True

    def _place_inputs(
        self,
        node: NodeRef,
        form: IntegerOperator,
        halves: Mapping[int, _Pair],
        result: _Pair | None,
        bias: str,
    ) -> list[str]:
        """The inputs of an operator on integers, each where its form has it."""
        parts = {read: halves.get(k) for k, read in enumerate(form.place_reads(len(node.inputs)))}
        parts |= {} if result is None else {form.result: result}
        places = dict.fromkeys(form.bias, bias) if bias else {}
        # In their order, as zero points may be made.
        for positions in sorted(parts):
            half = parts[positions]
            if half is None:
                names = node.inputs[:1]
            else:
                names = (half.names[0], *self._name_qparams(node, half))[-len(positions) :]
            places |= zip(positions, names, strict=True)
        return [places.get(k, "") for k in range(max(places) + 1)]

    def _has_kernel(self, node: NodeRef, halves: Mapping[int, _Pair]) -> bool:
        """True for scales, types and attributes that the operator takes."""
        first, *others = halves.values()
        # Of output channels: the last but for Conv and a turned Gemm.
        axis = {"Conv": 0, "Gemm": 0 if node.is_transposed else 1}.get(node.op_type, -1)
        weighted = node.op_type in _WEIGHTED
        for k, half in halves.items():
            if half.scale.size > 1 and not (weighted and k == 1 and self._lies_along(node, axis)):
                return False
        if node.op_type == "Gemm" and (
            node.attrs.get("alpha", 1.0),
            node.attrs.get("beta", 1.0),
        ) != (1.0, 1.0):
            return False
        if node.op_type == "Softmax" and self.opset < _SOFTMAX_OPSET:
            return False
        # QLinearAveragePool has none.
        if node.op_type == "AveragePool" and "dilations" in node.attrs:
            return False
        # Data in uint8 have kernels beside weights of either sign, data in int8 beside int8; others read one type.
        mixed = weighted and first.dtype == TensorProto.UINT8
        return mixed or all(half.dtype == first.dtype for half in others)

    def _lies_along(self, node: NodeRef, axis: int) -> bool:
        """True where the weight is a constant whose scales lie along this axis."""
        pair = self.index.maker(node, 1)
        shape = self.index.input_shape(pair)
        if pair is None or shape is None or not self.index.has_constant(pair, 0):
            return False
        flat = node.op_type == "Conv" or len(shape) == 2
        return flat and pair.read_int("axis", 1) % len(shape) == axis % len(shape)

    def _find_behind(self, node: NodeRef, k: int) -> NodeRefs:
        """The QuantizeLinear that alone reads output k, behind the Relu or Clip of a product; () for another."""
        chain = []
        result = node.make_result(k)
        while True:
            reader, k = self.index.find_reader(result) or (None, 0)
            if reader is None or k:
                return ()
            chain.append(reader)
            if reader.is_onnx(QUANTIZE):
                return tuple(chain)
            if not reader.is_onnx("Relu", "Clip") or len(chain) > 1 or node.op_type in _MOVES:
                return ()
            result = reader.result

    def _takes_result(self, chain: NodeRefs, result: _Pair, data: _Pair) -> bool:
        """True where the kernel writes this type, and the type ends where the Relu or Clip does."""
        if result.dtype != data.dtype or result.scale.size > 1:
            return False
        lowest, highest = _BYTES[result.dtype]
        for clip in chain[:-1]:
            ends = self.index.read_clip(clip)
            if ends is None:
                return False
            # The saturation of the type does the work of a Relu or Clip whose ends no code lies
            # beyond.
            low, high = (np.round(end / float(result.scale)) + float(result.zero) for end in ends)
            if low > lowest or high < highest:
                return False
        return True

    def _find_bias(self, node: NodeRef, halves: Mapping[int, _Pair]) -> str | None:
        """The name of an int32 bias, "" where there is none; None for one that the kernel does not take."""
        if not node.name_input(2):
            return ""
        expected = halves[0].scale.ravel() * halves[1].scale.ravel()
        value = self.index.input_value(node, 2)
        pair = self.index.maker(node, 2, DEQUANTIZE)
        if (
            value is not None
            and value.dtype == np.float32
            and abs(value.ravel() / expected).max() < _LARGEST
        ):
            # A float bias, which ONNX Runtime rounds as well.
            grain = PerChannel(0) if expected.size > 1 else PerTensor()
            spec = QuantSpec(bits=32, granularity=grain)
            steps = expected if expected.size > 1 else expected.reshape(())
            codes = quantize(value.ravel(), QParams(steps, np.zeros_like(steps, np.int32)), spec)
            return self.editor.add_constant(node.scope, f"{node.inputs[2]}/quantized", codes)
        # QLinearConv has no scale for its bias: it is that of the data times that of the weight.
        stored = self.index.find_input(pair)
        scale = self.index.input_value(pair, 1)
        if pair is None or scale is None or self.index.find_dtype(stored) != TensorProto.INT32:
            return None
        return pair.inputs[0] if np.allclose(scale.ravel(), expected, rtol=1e-5, atol=0) else None

    def _read_half(self, node: NodeRef | None, scope: str) -> _Pair | None:
        """A QuantizeLinear's codes, scale and zero point, or a DequantizeLinear's; None without 8 bits in float32."""
        if node is None or not node.is_onnx(QUANTIZE, DEQUANTIZE):
            return None
        codes = node.result if node.op_type == QUANTIZE else self.index.find_input(node)
        scale, zero = (self.index.input_value(node, k) for k in (1, 2))
        names = (codes.name if codes else "", node.inputs[1], node.name_input(2))
        # A name of an outer graph may stand for another tensor inside.
        seen = all(
            self.index.resolve_tensor(name, scope) == self.index.resolve_tensor(name, node.scope)
            for name in names
        )
        if (
            codes is None
            or scale is None
            or scale.dtype != np.float32
            or (names[2] and zero is None)
            or not seen
        ):
            return None
        dtype = self.index.find_dtype(codes)
        if zero is not None:
            dtype = next((kind for kind in _BYTES if zero.dtype.name == name_type(kind)), 0)
        # By the standard QuantizeLinear without a zero point writes uint8.
        elif node.op_type == QUANTIZE:
            dtype = TensorProto.UINT8
        if dtype not in _BYTES or node.attrs.get("block_size", 0):
            return None
        return _Pair(names, scale, np.zeros_like(scale) if zero is None else zero, dtype)

    def _name_qparams(self, node: NodeRef, half: _Pair) -> Iterator[str]:
        """The names of a scale and of a zero point, which is made where there is none."""
        yield half.names[1]
        if half.names[2]:
            yield half.names[2]
        else:
            yield self.editor.add_constant(
                node.scope,
                f"{half.names[1]}/zero_point",
                as_int64(half.zero),
                dtype=half.dtype,
            )
