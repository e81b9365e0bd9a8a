"""Weights of a file of any tool that can overflow the 16-bit sums of x86 CPUs without VNNI, from the weights alone.

The sums are those of `numerics.saturation`, the operators those of `targets.ort_sums`. Of a Q/DQ file those weights
count that ONNX Runtime reads in an integer kernel: int8 weights with uint8 data, or with int8 data that its optimizer
turns into uint8. It does so on any x86 CPU where QuantizeLinear, DequantizeLinear and node follow each other without a
second reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.annotate.find import is_dequantize, is_quantize
from onnxq.backends import find_sums
from onnxq.backends.sums import Data, IntegerProduct
from onnxq.graph import GraphIndex, NodeRef
from onnxq.graph.values import name_type
from onnxq.numerics import find_saturating_sums, quantize
from onnxq.sites import TensorId
from onnxq.spec import Granularity, PerChannel, PerTensor, QParams, QuantSpec

# Operators that only move data: ONNX Runtime moves the pair in front of them behind them.
_MOVES = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "MaxPool", "Expand", "Gather"}
)
# Operators that may stand between a product and its QuantizeLinear.
_FOLDED = _MOVES | {"Relu", "Clip"}
# Reasons why a weight that could overflow is exact all the same.
_SHARED_INT8 = "computed in float: its int8 data has other readers, so it is not made uint8"
_NO_RESULT = "computed in float: its result is not quantized"
_FLOAT_BIAS = "computed in float: neither its bias nor its result is quantized"
_RELU = "computed in float: the levels behind its Relu reach below 0, so the Relu stays"


@dataclass(frozen=True, kw_only=True)
class WeightSums:
    """One int8 weight of an operator that reads 8-bit data."""

    node: str
    op: str
    weight: str
    data: str
    # Output channels in which some input overflows a sum.
    rows: int
    all_rows: int
    # Sums that some input overflows, for one position of the output.
    sums: int
    all_sums: int
    # Why none overflows all the same; "" where one can.
    exact: str = ""

    @property
    def saturates(self) -> bool:
        """True when some input gives other results on a CPU without VNNI."""
        return self.rows > 0 and not self.exact


@dataclass(frozen=True, eq=False)
class Operand:
    """A weight with its quantized values."""

    product: IntegerProduct
    node: NodeRef
    weight: str
    data: str
    # As the operator reads them, and the same values as [rows, sums, 2].
    values: NDArray[np.int8]
    sums: NDArray[np.int8]
    # The nodes that make weight and data float; None where the integers are the operator's own inputs.
    dequantize: NodeRef | None = None
    source: NodeRef | None = None
    exact: str = ""

    @property
    def over(self) -> NDArray[np.bool_]:
        """[rows, sums]: True where some input makes the sum overflow."""
        return find_saturating_sums(self.sums.reshape(len(self.sums), -1), (0, 1))

    def count(self) -> WeightSums:
        """The weight with the numbers of rows and sums that can overflow."""
        over = self.over
        return WeightSums(
            node=self.node.name,
            op=self.node.op_type,
            weight=self.weight,
            data=self.data,
            rows=int(over.any(axis=1).sum()),
            all_rows=over.shape[0],
            sums=int(over.sum()),
            all_sums=over.size,
            exact=self.exact,
        )


def find_saturating(index: GraphIndex) -> tuple[WeightSums, ...]:
    """Every int8 weight that an inexact kernel multiplies by 8-bit data, in the order of execution; safe ones too."""
    return tuple(operand.count() for operand in find_operands(index))


def find_operands(index: GraphIndex) -> Iterator[Operand]:
    """The same weights with their quantized values; weights computed at run time are left out."""
    for node in index.nodes:
        product = find_sums().find_product(node)
        for k in product.weights if product is not None else ():
            if product is not None and max(k, product.data) < len(node.inputs):
                read = _read_pair_operand if product.reads is Data.PAIR else _read_stored_operand
                found = read(index, node, product, k)
                if found is not None:
                    yield found


def _read_stored_operand(index: GraphIndex, node: NodeRef, product: IntegerProduct, k: int) -> Operand | None:
    values = index.input_value(node, k)
    if values is None or values.dtype != np.int8:
        return None
    data = "uint8"
    if product.reads is Data.STORED:
        data = _find_stored_type(index, index.input(node, product.data), node, product.zero)
        if data != "uint8":
            return None
    sums = find_sums().pair_weights(node, values)
    return None if sums is None else Operand(product, node, str(index.input(node, k)), data, values, sums)


def _read_pair_operand(index: GraphIndex, node: NodeRef, product: IntegerProduct, k: int) -> Operand | None:
    found = _find_weight(index, index.maker(node, k))
    if found is None:
        return None
    weight, values, dequantize = found
    source = _find_data_source(index, index.maker(node, product.data))
    # ONNX Runtime's integer kernels are for float32 graphs only. 0: the type is not declared.
    if source is None or not {_find_type(index, node, 1) for node in (source, dequantize)} <= {0, TensorProto.FLOAT}:
        return None
    data = _find_stored_type(index, index.input(source, 0), source, 2)
    sums = find_sums().pair_weights(node, values) if data in ("uint8", "int8") else None
    if sums is None:
        return None
    shared = data == "int8" and not _turns_uint8(index, source)
    exact = _SHARED_INT8 if shared else _explain_float_result(index, product, node)
    return Operand(product, node, weight, data, values, sums, dequantize, source, exact)


def _find_weight(index: GraphIndex, node: NodeRef | None) -> tuple[str, NDArray[np.int8], NodeRef] | None:
    """Name, quantized values (as the operator reads them) and DequantizeLinear of an int8 weight; None for others.

    node: makes the weight as the operator reads it.
    """
    if node is not None and node.op_type == "Transpose" and not node.domain:
        found = _find_weight(index, index.maker(node))
        if found is None:
            return None
        axes = node.attrs.get("perm") or tuple(reversed(range(found[1].ndim)))
        return found[0], found[1].transpose(axes), found[2]
    if node is None or not is_dequantize(node) or int(node.attrs.get("block_size", 0)) > 0:
        return None
    held = index.input_value(node, 0)
    if held is not None:
        return (str(index.input(node, 0)), held, node) if held.dtype == np.int8 else None
    maker = index.maker(node)
    return _quantize_weight(index, maker, node) if maker is not None and is_quantize(maker) else None


def _quantize_weight(index: GraphIndex, maker: NodeRef, node: NodeRef) -> tuple[str, NDArray[np.int8], NodeRef] | None:
    """The same for a weight that the file holds as float, with a whole pair behind it."""
    value, scale, zero = (index.input_value(maker, k) for k in range(3))
    if value is None or scale is None or zero is None or zero.dtype != np.int8:
        return None
    grain: Granularity = PerTensor() if scale.size == 1 else PerChannel(int(maker.attrs.get("axis", 1)))
    if not (scale > 0).all() or not np.isfinite(value).all():
        return None
    spec = QuantSpec(bits=8, signed=True, symmetric=False, granularity=grain)
    qparams = QParams(scale.astype(np.float32), zero.astype(np.int32))
    return str(index.input(maker, 0)), np.asarray(quantize(value, qparams, spec)).astype(np.int8), node


def _find_data_source(index: GraphIndex, node: NodeRef | None) -> NodeRef | None:
    """The DequantizeLinear of the data that `node` makes, also through nodes that only move it."""
    while node is not None and node.op_type in _MOVES and not node.domain:
        node = index.maker(node)
    return node if is_dequantize(node) else None


def _turns_uint8(index: GraphIndex, source: NodeRef) -> bool:
    """True when the optimizer turns the pair of an int8 tensor into a uint8 one: its tensors have no other reader."""
    maker = index.maker(source)
    if maker is None or not is_quantize(maker):
        return False
    pair = (maker.result, source.result)
    return all(len(index.consumers(tensor)) == 1 and not index.is_output(tensor) for tensor in pair)


def _explain_float_result(index: GraphIndex, product: IntegerProduct, node: NodeRef) -> str:
    """Why the nodes behind keep the operator float; "" where they do not."""
    at, relu = node.result, False
    while True:
        readers = index.readers(at)
        quantizer = next((reader for reader in readers if is_quantize(reader)), None)
        if quantizer is not None:
            return _RELU if relu and not _starts_at_zero(index, quantizer) else ""
        if len(readers) != 1 or readers[0].op_type not in _FOLDED:
            break
        relu = relu or readers[0].op_type == "Relu"
        at = readers[0].result
    if product.result:
        return _NO_RESULT
    biased = node.op_type == "Gemm" and len(node.inputs) > 2 and bool(node.inputs[2])
    return _FLOAT_BIAS if biased and not is_dequantize(index.maker(node, 2)) else ""


def _starts_at_zero(index: GraphIndex, quantizer: NodeRef) -> bool:
    """True when every quantized value stands for 0 or more, so that the optimizer removes a Relu in front."""
    zero = index.input_value(quantizer, 2)
    return zero is None or zero.dtype.kind not in "iu" or int(zero.flat[0]) == np.iinfo(zero.dtype).min


def _find_stored_type(index: GraphIndex, tensor: TensorId | None, reader: NodeRef, zero: int) -> str:
    """The type of an integer tensor: of its reader's zero point, else declared, else its producer's default.

    zero: the input of `reader` with the zero point, -1 without one. "" where the type is not known.
    """
    if 0 <= zero < len(reader.inputs) and reader.inputs[zero]:
        found = _find_type(index, reader, zero)
        if found:
            return name_type(found)
    while tensor is not None:
        if index.dtype(tensor):
            return name_type(index.dtype(tensor))
        maker = index.producer(tensor)
        if maker is None:
            return ""
        if maker.op_type == "DynamicQuantizeLinear":
            return "uint8"
        if is_quantize(maker) or maker.op_type in ("QLinearConv", "QLinearMatMul"):
            # Inputs that hold the zero point of the result.
            zero = 2 if is_quantize(maker) else 7
            kind = _find_type(index, maker, zero) if zero < len(maker.inputs) and maker.inputs[zero] else 0
            return name_type(kind or int(maker.attrs.get("output_dtype", 0)) or TensorProto.UINT8)
        if maker.op_type not in _MOVES:
            return ""
        tensor = index.input(maker, 0)
    return ""


def _find_type(index: GraphIndex, node: NodeRef, position: int) -> int:
    """The type of an input, as TensorProto numbers it; 0 where it is not declared."""
    # Outputs of DynamicQuantizeLinear have fixed types, which files need not declare: uint8, float scale, uint8.
    tensor, maker = index.input(node, position), index.maker(node, position)
    if maker is not None and maker.op_type == "DynamicQuantizeLinear":
        return int(TensorProto.FLOAT if tensor is not None and tensor.name == maker.outputs[1] else TensorProto.UINT8)
    return 0 if tensor is None else index.dtype(tensor)
