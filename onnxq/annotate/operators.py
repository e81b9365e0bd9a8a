"""Operators that compute on integers themselves, and weights that can overflow the 16-bit sums of their kernels.

The operators (QLinearConv, MatMulInteger, QGemm …) are never changed. The sums are those of x86 CPUs without VNNI, told
from the weights alone, as `numerics.weights` describes them. Of a Q/DQ file those weights count that ONNX Runtime
reads in an integer kernel: int8 weights with uint8 data, or with int8 data that its optimizer turns into uint8. It does
so on any x86 CPU where QuantizeLinear, DequantizeLinear and node follow each other without a second reader.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.annotate.find import is_dequantize, is_quantize, is_read_once
from onnxq.arrays import Array, Mask, are_finite, as_float32, as_int32
from onnxq.backends import find_sums
from onnxq.backends.base import Data, IntegerProduct, IntegerSums
from onnxq.graph import LAYOUT_OPS, GraphIndex, MaybeNode, NodeRef
from onnxq.graph.values import name_type
from onnxq.numerics import find_saturating_sums, quantize
from onnxq.sites import MaybeTensor, Names
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec

# ONNX, and the domains of ONNX Runtime, those of its optimized graphs included.
_ENGINE_DOMAINS = ("", "com.microsoft", "com.ms.internal.nhwc", "com.microsoft.nchwc")
_NAMES = re.compile(
    r"(QLinear|QOrdered|DynamicQuantize|MatMulInteger|ConvInteger|MatMulNBits|MatMulBnb4|GatherBlockQuantized).*"
    r"|QGemm|QAttention|QMoE|QEmbedLayerNormalization"
)
PairWeights = Callable[[NodeRef, Array], Array | None]
# Operators that quantize their data themselves, always to uint8.
_SELF_QUANTIZING = ("DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul")
# Bits of the types that count; int32 and wider are accumulators, shapes and indices.
_INTEGERS: dict[int, int] = {
    TensorProto.INT8: 8,
    TensorProto.UINT8: 8,
    TensorProto.INT16: 16,
    TensorProto.UINT16: 16,
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
}


@dataclass(frozen=True, kw_only=True)
class OperatorInfo:
    """One such node."""

    node: str
    op: str
    domain: str = ""
    scope: str = ""
    # Its attribute `bits`, else the width of the narrowest type it reads; 0 when neither is known.
    bits: int = 0
    # Integer types that it reads, in the order of its inputs, each once.
    types: Names = ()


def find_operators(index: GraphIndex) -> tuple[OperatorInfo, ...]:
    """Every operator on integers of every scope, in the order of execution."""
    return tuple(
        _describe_operator(index, node)
        for node in index.nodes
        if node.domain in _ENGINE_DOMAINS and _NAMES.fullmatch(node.op_type)
    )


def _describe_operator(index: GraphIndex, node: NodeRef) -> OperatorInfo:
    dtypes = [
        dtype
        for dtype in dict.fromkeys(map(index.find_dtype, index.list_reads(node)))
        if dtype in _INTEGERS
    ]
    width = node.attrs.get("bits")
    if not isinstance(width, int):
        width = min((_INTEGERS[dtype] for dtype in dtypes), default=0)
    return OperatorInfo(
        node=node.name,
        op=node.op_type,
        domain=node.domain,
        scope=node.scope,
        bits=width or (8 if node.op_type in _SELF_QUANTIZING else 0),
        types=tuple(map(name_type, dtypes)),
    )


# Operators that only move data: ONNX Runtime moves the pair in front of them behind them.
_MOVES = LAYOUT_OPS | {"Slice", "MaxPool", "Expand", "Gather"}
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


SaturatingWeights = tuple[WeightSums, ...]


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
    dequantize: MaybeNode = None
    source: MaybeNode = None
    exact: str = ""

    @property
    def over(self) -> Mask:
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
            all_rows=len(over),
            sums=int(over.sum()),
            all_sums=over.size,
            exact=self.exact,
        )


def find_saturating(index: GraphIndex, sums: IntegerSums | None = None) -> SaturatingWeights:
    """Every int8 weight that an inexact kernel multiplies by 8-bit data, in the order of execution; safe ones too.

    sums: of the engine's kernels; None for those of ONNX Runtime.
    """
    return tuple(operand.count() for operand in find_operands(index, sums))


def find_operands(index: GraphIndex, sums: IntegerSums | None = None) -> Iterator[Operand]:
    """The same weights with their quantized values; weights computed at run time are left out."""
    sums = sums or find_sums()
    for node in index.nodes:
        product = sums.find_product(node)
        if product is None:
            continue
        read = _read_pair_operand if product.reads is Data.PAIR else _read_stored_operand
        for k in product.weights:
            if max(k, product.data) < len(node.inputs):
                operand = read(index, node, product, k, sums.pair_weights)
                if operand is not None:
                    yield operand


def _read_stored_operand(
    index: GraphIndex, node: NodeRef, product: IntegerProduct, k: int, pair_weights: PairWeights
) -> Operand | None:
    values = index.input_value(node, k)
    if values is None or values.dtype != np.int8:
        return None
    if product.reads is Data.STORED:
        data = index.find_input(node, product.data)
        if _find_stored_type(index, data, node, product.zero) != "uint8":
            return None
    sums = pair_weights(node, values)
    if sums is None:
        return None
    return Operand(product, node, str(index.find_input(node, k)), "uint8", values, sums)


def _read_pair_operand(
    index: GraphIndex, node: NodeRef, product: IntegerProduct, k: int, pair_weights: PairWeights
) -> Operand | None:
    pair = _find_weight(index, index.maker(node, k))
    # Nodes that only move the data may stand between.
    source = index.find_producer(index.find_origin(index.find_input(node, product.data), _MOVES))
    if pair is None or source is None or not is_dequantize(source):
        return None
    weight, values, dequantize = pair
    # ONNX Runtime's integer kernels are for float32 graphs only. 0: the type is not declared.
    if any(
        _find_type(index, half, 1) not in (0, TensorProto.FLOAT) for half in (source, dequantize)
    ):
        return None
    data = _find_stored_type(index, index.find_input(source), source, 2)
    sums = pair_weights(node, values) if data in ("uint8", "int8") else None
    if sums is None:
        return None
    shared = data == "int8" and not _turns_uint8(index, source)
    exact = _SHARED_INT8 if shared else _explain_float_result(index, product, node)
    return Operand(product, node, weight, data, values, sums, dequantize, source, exact)


# Name, quantized values and DequantizeLinear.
_Weight = tuple[str, NDArray[np.int8], NodeRef]


def _find_weight(index: GraphIndex, node: MaybeNode) -> _Weight | None:
    """Name, quantized values (as the operator reads them) and DequantizeLinear of an int8 weight; None for others.

    node: makes the weight as the operator reads it.
    """
    if node is not None and node.is_onnx("Transpose"):
        pair = _find_weight(index, index.maker(node))
        if pair is None:
            return None
        name, values, dequantize = pair
        # Without `perm` a Transpose reverses all axes.
        axes = node.attrs.get("perm") or tuple(reversed(range(values.ndim)))
        return name, values.transpose(axes), dequantize
    if node is None or not is_dequantize(node) or node.read_int("block_size", 0) > 0:
        return None
    stored = index.input_value(node, 0)
    if stored is not None:
        return (str(index.find_input(node)), stored, node) if stored.dtype == np.int8 else None
    maker = index.maker(node)
    return (
        _quantize_weight(index, maker, node) if maker is not None and is_quantize(maker) else None
    )


def _quantize_weight(index: GraphIndex, maker: NodeRef, node: NodeRef) -> _Weight | None:
    """The same for a weight that the file holds as float, with a whole pair behind it."""
    value, scale, zero = (index.input_value(maker, k) for k in range(3))
    if value is None or scale is None or zero is None or zero.dtype != np.int8:
        return None
    if not (scale > 0).all() or not are_finite(value):
        return None
    grain = PerTensor() if scale.size == 1 else PerChannel(maker.read_int("axis", 1))
    spec = QuantSpec(symmetric=False, granularity=grain)
    qparams = QParams(as_float32(scale), as_int32(zero))
    return (
        str(index.find_input(maker)),
        np.asarray(quantize(value, qparams, spec)).astype(np.int8),
        node,
    )


def _turns_uint8(index: GraphIndex, source: NodeRef) -> bool:
    """True when the optimizer turns the pair of an int8 tensor into a uint8 one: its tensors have no other reader."""
    maker = index.maker(source)
    if maker is None or not is_quantize(maker):
        return False
    return is_read_once(index, maker.result) and is_read_once(index, source.result)


def _explain_float_result(index: GraphIndex, product: IntegerProduct, node: NodeRef) -> str:
    """Why the nodes behind keep the operator float; "" where they do not."""
    result = node.result
    relu = False
    while True:
        readers = index.readers(result)
        quantizer = next(filter(is_quantize, readers), None)
        if quantizer is not None:
            return _RELU if relu and not _starts_at_zero(index, quantizer) else ""
        if len(readers) != 1 or readers[0].op_type not in _FOLDED:
            break
        relu = relu or readers[0].op_type == "Relu"
        result = readers[0].result
    if product.result:
        return _NO_RESULT
    bias = index.find_input(node, 2) if node.op_type == "Gemm" else None
    return _FLOAT_BIAS if bias is not None and not is_dequantize(index.find_producer(bias)) else ""


def _starts_at_zero(index: GraphIndex, quantizer: NodeRef) -> bool:
    """True when every quantized value stands for 0 or more, so that the optimizer removes a Relu in front."""
    zero = index.input_value(quantizer, 2)
    return (
        zero is None or zero.dtype.kind not in "iu" or int(zero.flat[0]) == np.iinfo(zero.dtype).min
    )


def _find_stored_type(index: GraphIndex, tensor: MaybeTensor, reader: NodeRef, zero: int) -> str:
    """The type of an integer tensor: of its reader's zero point, else declared, else its producer's default.

    zero: the input of `reader` with the zero point, -1 without one. "" where the type is not known.
    """
    declared = _find_type(index, reader, zero) if zero >= 0 else 0
    while not declared and tensor is not None:
        declared = index.find_dtype(tensor)
        maker = index.find_producer(tensor)
        if declared or maker is None:
            break
        if maker.op_type == "DynamicQuantizeLinear":
            return "uint8"
        if is_quantize(maker) or maker.op_type in ("QLinearConv", "QLinearMatMul"):
            # Inputs that hold the zero point of the result.
            declared = _find_type(index, maker, 2 if is_quantize(maker) else 7)
            return name_type(declared or maker.read_int("output_dtype", 0) or TensorProto.UINT8)
        tensor = index.find_input(maker) if maker.op_type in _MOVES else None
    return name_type(declared) if declared else ""


def _find_type(index: GraphIndex, node: NodeRef, position: int) -> int:
    """The type of an input, as TensorProto numbers it; 0 where it is not declared, and where there is none."""
    # Outputs of DynamicQuantizeLinear have fixed types, which files need not declare: uint8, float scale, uint8.
    tensor = index.find_input(node, position)
    maker = index.maker(node, position, "DynamicQuantizeLinear")
    if tensor is None or maker is None:
        return index.find_dtype(tensor)
    return int(TensorProto.FLOAT if tensor.name == maker.outputs[1] else TensorProto.UINT8)
