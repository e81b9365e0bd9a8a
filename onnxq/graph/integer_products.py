"""Products of dynamically quantized data in the two forms that a file may have, and the way from each to the other.

pairs      x -> DynamicQuantizeLinear -> DequantizeLinear -> MatMul, Gemm or LSTM, whose weight comes from a
           DequantizeLinear of stored integers
operators  MatMulInteger(x, w) -> Cast -> Mul(., Mul(scale of x, scale of w)), as onnxruntime.quantization writes it;
           the same of ConvInteger, which is read only;
           com.microsoft's DynamicQuantizeLSTM, which quantizes x by itself

Both compute the same. Pairs are what plans, passes and reports know; ONNX Runtime makes the fastest kernels of the
operators, bias and all (DynamicQuantizeMatMul; MatMulIntegerToFloat where several products read one x).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxq.arrays import Array, Floats, as_float32, as_int32
from onnxq.graph.base import DEQUANTIZE, DYNAMIC, MICROSOFT, Graph, MaybeNode, NodeRef
from onnxq.graph.editing.editor import Editor
from onnxq.graph.index import GraphIndex
from onnxq.graph.light import M
from onnxq.graph.nbits import add_dequantize, read_nbits

_LSTM = "DynamicQuantizeLSTM"
_BYTES = (TensorProto.INT8, TensorProto.UINT8)
# Operators that give out sums of integers.
_SUMS = ("MatMulInteger", "ConvInteger")
# Endings that tools give to the names of integers; the rest is the name of the tensor that they stand for.
_STORED = ("/quantized", "_quantized")
# Endings of the names of constants, and of the results of DynamicQuantizeLinear.
_PARTS = ("quantized", "scale", "zero_point")
# Inputs of LSTM and DynamicQuantizeLSTM: x, two weights, and what both have alike (bias, lengths, states, peepholes).
_LSTM_WEIGHTS = (1, 2)
_LSTM_INPUTS = 8


def write_integer_products(proto: M) -> M:
    """A copy with operators in the place of pairs, wherever such an operator exists; the model itself without any.

    A node keeps its name, and so do the tensors that it reads and writes.
    """
    index = GraphIndex(proto)
    products = [
        (node, data) for node in index.nodes if (data := _find_dynamic(index, node)) is not None
    ]
    if not products:
        return proto
    editor = Editor(proto)
    for node, data in products:
        if node.op_type == "LSTM":
            _write_lstm(index, editor, node, data)
        else:
            _write_product(index, editor, node, data)
    return editor.finish()


def read_integer_products(proto: M) -> M:
    """A copy with pairs in the place of operators, onnxq's or onnxruntime.quantization's; the model itself without any.

    proto: with every node named. MatMulNBits is among them.
    """
    proto = read_nbits(proto)
    index = GraphIndex(proto)
    products = list(_find_products(index))
    layers = [node for node in index.nodes if node.op_type == _LSTM and _is_stored(index, node)]
    if not products and not layers:
        return proto
    editor = Editor(proto)
    reader = _Reader(index, editor)
    for product in products:
        reader.restore_product(product)
    for node in layers:
        reader.restore_lstm(node)
    return editor.finish()


def _find_dynamic(index: GraphIndex, node: NodeRef) -> MaybeNode:
    """The DynamicQuantizeLinear of a product's data, where its weights are such as the operator takes."""
    if not node.is_onnx("MatMul", "Gemm", "LSTM"):
        return None
    data = index.maker(index.maker(node, 0, DEQUANTIZE), 0, DYNAMIC)
    weights = _LSTM_WEIGHTS if node.op_type == "LSTM" else (1,)
    return data if data is not None and all(_has_bytes(index, node, k) for k in weights) else None


def _has_bytes(index: GraphIndex, node: NodeRef, k: int) -> bool:
    """True for a weight of stored bytes with a scale per output channel, or one for all."""
    pair = index.maker(node, k, DEQUANTIZE)
    scale = index.input_value(pair, 1)
    if pair is None or scale is None or pair.attrs.get("block_size", 0):
        return False
    # 4 bits in the file become bytes by a Cast, whose type is not declared.
    cast = index.maker(pair, 0, "Cast")
    dtype = index.find_dtype(index.find_input(pair)) if cast is None else cast.read_int("to", 0)
    axis = 0 if node.is_transposed else 1
    rank = 3 if node.op_type == "LSTM" else 2
    return dtype in _BYTES and (scale.size == 1 or pair.read_int("axis", 1) % rank == axis)


def _read_bytes(index: GraphIndex, pair: NodeRef) -> Array:
    """The integers of a weight that `_has_bytes`; a Cast makes bytes of those of fewer bits."""
    cast = index.maker(pair)
    values = np.asarray(index.input_value(cast or pair, 0))
    if cast is None:
        return values
    return values.astype(helper.tensor_dtype_to_np_dtype(int(cast.attrs["to"])))


def _write_product(index: GraphIndex, editor: Editor[Any], node: NodeRef, data: NodeRef) -> None:
    weight = index.maker(node, 1)
    assert weight is not None
    x, x_scale, x_zero = data.outputs
    stored, scale = weight.inputs[:2]
    zero = [name for name in weight.inputs[2:3] if name]
    bias = node.name_input(2)
    out = node.outputs[0]
    name = node.name
    editor.remove_node(name)

    def add(
        op: str, inputs: list[str], part: str, *, result: str = "", called: str = "", **attrs: Any
    ) -> str:
        tensor = result or editor.fresh(f"{name}/{part}")
        called = called or editor.fresh(f"{name}/{part}/{op}")
        editor.insert_node(node.scope, op, inputs, [tensor], name=called, attrs=attrs)
        return tensor

    if node.is_transposed:
        # The integers stay in the order of the model's weight; engines transpose a constant once.
        stored = add("Transpose", [stored], "transposed", perm=[1, 0])
    sums = add("MatMulInteger", [x, stored, x_zero, *zero], "sums", called=name)
    sums = add("Cast", [sums], "sums_float", to=int(TensorProto.FLOAT))
    # Both scales first: the product of the large tensor is one Mul then, as ONNX Runtime's fusion
    # expects it.
    factor = add("Mul", [x_scale, scale], "scale")
    product = add("Mul", [sums, factor], "product", result="" if bias else out)
    if bias:
        add("Add", [product, bias], "biased", result=out)


def _write_lstm(index: GraphIndex, editor: Editor[Any], node: NodeRef, data: NodeRef) -> None:
    inputs = [*map(node.name_input, range(_LSTM_INPUTS))]
    inputs[0] = data.inputs[0]
    qparams = []
    for k in _LSTM_WEIGHTS:
        pair = index.maker(node, k)
        assert pair is not None
        values = _read_bytes(index, pair)
        scale = index.input_value(pair, 1)
        zero = index.input_value(pair, 2)
        assert scale is not None
        base = f"{name_source(pair.inputs[0])}/transposed"
        zero = np.zeros(scale.shape, values.dtype) if zero is None else zero
        # The kernel packs its weights when it is made, so they must be constants in its own order of axes, with scales
        # for each direction.
        shape = (len(values), scale.size) if scale.size > 1 else (len(values),)
        parts = (
            np.swapaxes(values, 1, 2),
            np.broadcast_to(scale, shape),
            np.broadcast_to(zero, shape),
        )
        inputs[k], *names = _add_constants(editor, node.scope, base, parts)
        qparams += names
    # The kernel has no such attribute: it takes sequences first, which 0 means.
    attrs = {key: value for key, value in node.attrs.items() if key != "layout"}
    editor.replace_node(node, _LSTM, inputs + qparams, domain=MICROSOFT, attrs=attrs)


def _add_constants(
    editor: Editor[Any], scope: str, base: str, values: tuple[Array, ...]
) -> list[str]:
    """New initializers for integers, scale and zero point, called `base` with the name of the part; their names."""
    # np.array, since ascontiguousarray makes a vector of a single number.
    return [
        editor.add_constant(scope, f"{base}/{part}", np.array(value, order="C"))
        for part, value in zip(_PARTS, values, strict=True)
    ]


@dataclass(frozen=True)
class _Product:
    """A MatMulInteger with the nodes that make floats of its sums.

    data: the DynamicQuantizeLinear; scale: that of the weight; cast, product: the nodes behind.
    """

    node: NodeRef
    data: NodeRef
    scale: str
    cast: NodeRef
    product: NodeRef


def _find_products(index: GraphIndex) -> Iterator[_Product]:
    for node in index.nodes:
        data = index.maker(node, 0, DYNAMIC)
        if node.op_type not in _SUMS or data is None:
            continue
        cast = index.find_follower(node, "Cast")
        product = index.find_follower(cast, "Mul")
        factor = index.maker(product, 0, "Mul") or index.maker(product, 1, "Mul")
        if cast is None or product is None or factor is None:
            continue
        if node.inputs[2:3] != data.outputs[2:3] or data.outputs[1] not in factor.inputs:
            continue
        scale = factor.inputs[1 - factor.inputs.index(data.outputs[1])]
        stored = index.has_constant(node, 1) or _is_transposed(index, node)
        if stored and index.is_constant(index.resolve_tensor(scale, factor.scope)):
            yield _Product(node, data, scale, cast, product)


def is_rescaling(index: Graph, node: NodeRef) -> bool:
    """True for a Mul of a scale of each run, and for one of the sums of a product on integers."""
    makers = [index.maker(node, k) for k in range(len(node.inputs)) if node.op_type == "Mul"]
    behind = (
        index.maker(maker) if maker is not None and maker.op_type == "Cast" else maker
        for maker in makers
    )
    return any(maker is not None and maker.op_type in (DYNAMIC, *_SUMS) for maker in behind)


def _is_transposed(index: GraphIndex, node: NodeRef) -> bool:
    """True where the weight is a constant behind a Transpose of its two axes."""
    maker = index.maker(node, 1, "Transpose")
    if maker is None or list(maker.attrs.get("perm", [1, 0])) != [1, 0]:
        return False
    return index.has_constant(maker, 0)


def _is_stored(index: GraphIndex, node: NodeRef) -> bool:
    """True where weights, scales and zero points of a DynamicQuantizeLSTM are such as a DequantizeLinear takes."""
    for k in _LSTM_WEIGHTS:
        values = index.input_value(node, k)
        # Inputs 8 and 10, each with its zero point behind.
        scale = index.input_value(node, 6 + 2 * k)
        # A DequantizeLinear has no scales for each direction.
        if values is None or scale is None or (scale.ndim in (1, 2) and (scale != scale[:1]).any()):
            return False
    return True


def name_source(stored: str) -> str:
    """The name of the tensor that stored integers stand for."""
    for ending in _STORED:
        stored = stored.removesuffix(ending)
    return stored


@dataclass
class _Reader:
    """Puts pairs in the place of operators; each tensor gets one DequantizeLinear for a scope."""

    index: GraphIndex
    editor: Editor[Any]
    # By scope and name of the integers, or of the data of an LSTM.
    dequantized: dict[tuple[str, str], str] = field(default_factory=dict)

    def restore_product(self, product: _Product) -> None:
        """Write a Conv or MatMul of pairs, or a Gemm where the operator's integers are transposed."""
        node = product.node
        out = product.product.outputs[0]
        transpose = self.index.maker(node, 1) if _is_transposed(self.index, node) else None
        stored = node.inputs[1] if transpose is None else transpose.inputs[0]
        x = self._add_dequantize(node.scope, list(product.data.outputs), 1)
        weight = self._add_dequantize(
            node.scope, [stored, product.scale, *node.inputs[3:4]], 1 if transpose is None else 0
        )
        for follower in (product.cast, product.product):
            self.editor.remove_node(follower.name)
        op = "Conv" if node.op_type == "ConvInteger" else "MatMul" if transpose is None else "Gemm"
        attrs = {"transB": 1} if op == "Gemm" else node.attrs
        self.editor.replace_node(node, op, [x, weight], [out], attrs=attrs)

    def restore_lstm(self, node: NodeRef) -> None:
        """Write an LSTM whose data and weights are pairs."""
        inputs = list(node.inputs[:_LSTM_INPUTS])
        base = inputs[0]
        key = node.scope, base
        if key not in self.dequantized:
            names = [self.editor.fresh(f"{base}/{part}") for part in _PARTS]
            self.editor.insert_node(
                node.scope, DYNAMIC, [base], names, name=self.editor.fresh(f"{base}/{DYNAMIC}")
            )
            self.dequantized[key] = self._add_dequantize(node.scope, names, 1)
        inputs[0] = self.dequantized[key]
        for k in _LSTM_WEIGHTS:
            values, scale, zero = (
                self.index.input_value(node, at) for at in (k, 6 + 2 * k, 7 + 2 * k)
            )
            assert values is not None
            assert scale is not None
            zero = np.zeros(scale.shape, values.dtype) if zero is None else zero
            source = name_source(node.inputs[k]).removesuffix("/transposed")
            # [directions, K, 4H] back to [directions, 4H, K], with the scales that all
            # directions share.
            parts = (np.swapaxes(values, 1, 2), scale[0], zero[0])
            inputs[k] = self._add_dequantize(
                node.scope, _add_constants(self.editor, node.scope, source, parts), 1
            )
        self.editor.replace_node(node, "LSTM", inputs, attrs=node.attrs)

    def _add_dequantize(self, scope: str, inputs: list[str], axis: int) -> str:
        """The dequantized tensor of integers, scale and zero point."""
        key = scope, inputs[0]
        if key not in self.dequantized:
            base = name_source(inputs[0])
            self.dequantized[key] = add_dequantize(self.editor, scope, base, inputs, axis=axis)
        return self.dequantized[key]


_INTEGERS = frozenset(
    {np.dtype(kind) for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32)}
)


def dequantize_node(index: GraphIndex, node: NodeRef) -> Floats | None:
    """The float32 values that a DequantizeLinear makes of constants; None for another node, as above."""
    if not node.is_onnx(DEQUANTIZE) or node.scope or node.attrs.get("block_size", 0):
        return None
    # An output keeps its node: an initializer of its name would make the graph give out a constant.
    if index.is_output(node.result) or not all(map(index.is_constant, index.list_reads(node))):
        return None
    codes, scale, zero = (index.input_value(node, k) for k in range(3))
    if codes is None or scale is None or scale.dtype != np.float32 or codes.dtype not in _INTEGERS:
        return None
    if node.attrs.get("output_dtype", 0) not in (0, TensorProto.FLOAT):
        return None
    shape = [1] * codes.ndim
    if scale.size > 1:
        axis = node.read_int("axis", 1) % max(codes.ndim, 1)
        if scale.ndim != 1 or scale.size != codes.shape[axis]:
            return None
        shape[axis] = scale.size
    # That of symmetric weights is 0.
    if zero is not None and zero.any():
        # In int32, as ORT subtracts: int8 less uint8 does not fit either of them.
        codes = as_int32(codes) - as_int32(zero).reshape(shape if zero.size > 1 else ())
    return np.asarray(as_float32(codes) * scale.reshape(shape if scale.size > 1 else ()))
