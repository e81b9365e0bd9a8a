"""MatMulNBits of com.microsoft, and the DequantizeLinear and MatMul that compute the same; each from the other.

GatherBlockQuantized, which looks rows of such a table up, is read as a DequantizeLinear and a Gather.

    y = MatMulNBits(x, packed [N, blocks, bytes], scales [N, blocks], zero points [N, bytes])

A block is 16, 32, 64 ... values of one column of the weight; the last is filled up. Its integers are unsigned, of 2, 4
or 8 bits, packed little end first; so are the zero points of a column, which are 2^(bits - 1) where they are left out.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.arrays import Array, Bytes
from onnxq.errors import ModelError, PlanError
from onnxq.graph.base import DEQUANTIZE, MICROSOFT, MaybeNode, NodeRef
from onnxq.graph.convert import ensure_opset
from onnxq.graph.editing.editor import Editor
from onnxq.graph.index import GraphIndex
from onnxq.graph.light import M, bare_proto
from onnxq.graph.scopes import map_entries, walk_nodes

OPERATOR = "MatMulNBits"
_LOOKUP = "GatherBlockQuantized"
# Endings of the names of a weight's parts, behind the name of the tensor that they stand for.
_PACKED = "/packed"
_SCALES = "/scales"
_ZEROS = "/zero_points"
# Widths that the CPU's kernel has: ONNX Runtime 1.32.
_WIDTHS = (2, 4, 8)
_SMALLEST_BLOCK = 16
# Activations are rounded to 8 bits.
_INTEGER_LEVEL = 4
# Type of stored integers -> the offset that makes them unsigned, and their width.
_STORED: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 8),
    TensorProto.INT8: (128, 8),
    TensorProto.UINT4: (0, 4),
    TensorProto.INT4: (8, 4),
    TensorProto.UINT2: (0, 2),
    TensorProto.INT2: (2, 2),
}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
# The first opset whose DequantizeLinear has blocks.
_BLOCKS_OPSET = 21


def pack_bits(values: Array, bits: int) -> Bytes:
    """Pack unsigned integers of 2, 4 or 8 bits along the last axis, the first into the lowest bits."""
    each = 8 // bits
    gap = -values.shape[-1] % each
    filled = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, gap)]) if gap else values
    parts = np.asarray(filled, np.uint8).reshape(*filled.shape[:-1], -1, each)
    packed = parts[..., 0].copy()
    for k in range(1, each):
        packed |= parts[..., k] << np.uint8(k * bits)
    return packed


def unpack_bits(packed: Array, bits: int, count: int | None = None) -> Bytes:
    """Unpack the first `count` integers of each row that `pack_bits` packed; by default all, fillings too."""
    parts = [packed >> np.uint8(k * bits) & np.uint8(2**bits - 1) for k in range(8 // bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)[..., :count]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A weight in blocks. codes: unsigned, [K, N]; scale: [blocks, N]; zero: the same, floats too; None: the middle.

    axis: blocks run along it, in tables along another than 0.
    """

    codes: Array
    scale: Array
    zero: Array | None
    bits: int
    size: int
    axis: int = 0

    def pack(self) -> tuple[Array, Array, Array | None]:
        """The operator's constants: packed, scales, zero points."""
        depth, columns = self.codes.shape
        count = len(self.scale)
        filled = np.zeros((columns, count * self.size), np.uint8)
        filled[:, :depth] = self.codes.T
        packed = pack_bits(filled.reshape(columns, count, self.size), self.bits)
        zero = self.zero
        if zero is not None:
            zero = np.ascontiguousarray(zero.T)
            zero = pack_bits(zero, self.bits) if zero.dtype == np.uint8 else zero
        return packed, np.ascontiguousarray(self.scale.T), zero


def write_nbits(
    proto: M,
    accuracy_level: int,
    bits: Mapping[str, int],
    minima: Mapping[str, Array] | None = None,
) -> M:
    """A copy with MatMulNBits in the place of each MatMul whose weight comes from a DequantizeLinear in blocks.

    accuracy_level: the operator's attribute; 0 leaves it out. bits: of weights that have fewer than their storage, by
    the name of the DequantizeLinear, whose metadata the operators get. minima: the floats that blocks begin at, in the
    place of zero points, by the same name. Nodes keep their names. What the operator does not take stays as it is.
    Raises PlanError for minima that no operator has.
    """
    index = GraphIndex(proto)
    products = [(node, pair) for node in index.nodes if (pair := _find_pair(index, node))]
    minima = minima or {}
    for name in minima.keys() - {pair.name for _, pair in products}:
        cause = "begins blocks at floats, and no MatMul reads it"
        raise PlanError(name, cause, "plan this model again", code="Q407")
    if not products:
        return proto
    notes = {
        node.name: map_entries(node.metadata_props) for node in walk_nodes(bare_proto(proto).graph)
    }
    editor = Editor(proto)
    constants = {}
    # In ONNX Runtime 1.28 on Arm level 4 ends the process where a body reads weights of the graph around it.
    leaders = {}
    if accuracy_level != _INTEGER_LEVEL:
        pairs = {pair.name: pair for _, pair in products if pair.name not in minima}
        leaders = _find_repeated(index, pairs)
    for node, pair in products:
        blocks = _read_pair(index, pair, bits.get(pair.name, 8))
        if (least := minima.get(pair.name)) is not None:
            blocks = replace(blocks, zero=(-least / blocks.scale).astype(blocks.scale.dtype))
        # One that others repeat is stored in the main graph, with the first of them.
        name = leaders.get(pair.name, pair.name)
        if name not in constants:
            scope = "" if name in leaders else pair.scope
            constants[name] = _store_blocks(editor, pair, blocks, scope)
        depth, columns = blocks.codes.shape
        attrs = {"K": depth, "N": columns, "bits": blocks.bits, "block_size": blocks.size}
        if accuracy_level:
            attrs["accuracy_level"] = accuracy_level
        editor.replace_node(
            node,
            OPERATOR,
            [node.inputs[0], *constants[name]],
            domain=MICROSOFT,
            attrs=attrs,
            metadata=notes[pair.name],
        )
    return editor.finish()


def _store_blocks(editor: Editor[M], pair: NodeRef, blocks: Blocks, scope: str) -> list[str]:
    """Names of the operator's constants, stored in a scope."""
    base = pair.name.removesuffix(f"/{DEQUANTIZE}")
    parts = zip((_PACKED, _SCALES, _ZEROS), blocks.pack(), strict=True)
    return [editor.add_constant(scope, base + end, part) for end, part in parts if part is not None]


def _find_repeated(index: GraphIndex, pairs: Mapping[str, NodeRef]) -> dict[str, str]:
    """Pairs of bodies of If, Loop or Scan -> the first of those, itself too, that has the same numbers elsewhere.

    The branches of a merged decoder have one set of weights, which is stored in the main graph then.
    """
    groups = defaultdict(list)
    for pair in pairs.values():
        if pair.scope:
            values = [index.input_value(pair, k) for k in range(len(pair.inputs))]
            digests = (
                value if value is None else hashlib.sha256(value.tobytes()).digest()
                for value in values
            )
            groups[(tuple(sorted(pair.attrs.items())), *digests)].append(pair.name)
    return {name: names[0] for names in groups.values() if len(names) > 1 for name in names}


def _find_pair(index: GraphIndex, node: NodeRef) -> MaybeNode:
    """The DequantizeLinear of a MatMul's weight, where the operator takes its blocks."""
    pair = index.maker(node, 1) if node.is_onnx("MatMul") else None
    if pair is None or pair.op_type != DEQUANTIZE:
        return None
    size = pair.read_int("block_size", 0)
    # The operator has blocks of powers of two alone.
    if size < _SMALLEST_BLOCK or size & (size - 1):
        return None
    stored, scale = (index.find_dtype(index.find_input(pair, k)) for k in (0, 1))
    constant = index.has_constant(pair, 0) and index.has_constant(pair, 1)
    # Along K: axis 0 of a weight [K, N], or -2.
    along = pair.read_int("axis", 1) % 2 == 0 and len(index.input_shape(pair) or ()) == 2
    return pair if constant and along and stored in _STORED and scale in _FLOATS else None


def _read_pair(index: GraphIndex, pair: NodeRef, bits: int) -> Blocks:
    values, scale, zero = (index.input_value(pair, k) for k in range(3))
    assert values is not None
    assert scale is not None
    offset, width = _STORED[index.find_dtype(index.find_input(pair))]
    # 2 bits around 0 are -2 to 1, so that the middle is that of their width; 3 bits, and 5 to 7, fill up the next.
    narrow = width
    if bits <= 4:
        narrow = 2 if bits == 2 else 4
    offset = min(offset, 2 ** (narrow - 1))
    # In 16 bits: in 8 the sum wraps around.
    codes = np.asarray(values.astype(np.int16) + offset, np.uint8)
    zeros = None if zero is None else np.asarray(zero.astype(np.int16) + offset, np.uint8)
    # Left out, zero points of a pair are 0, and those of the operator are the middle.
    if zeros is None and offset == 0:
        zeros = np.zeros(scale.shape, np.uint8)
    # Symmetric blocks need no zero points in the file.
    usual = zeros is None or bool((zeros == 2 ** (narrow - 1)).all())
    return Blocks(codes, scale, None if usual else zeros, narrow, int(pair.attrs["block_size"]))


def read_nbits(proto: M) -> M:
    """A copy with a DequantizeLinear and a MatMul in the place of each MatMulNBits, of any tool; the model without any.

    proto: with every node named. It is raised to the opset of blocks, or stays where that is not possible. Operators
    with float zero points, or an order of their own (g_idx), stay.
    """
    products, editor = _find_blocks(proto, _read_product)
    if editor is None:
        return proto
    weights = {}
    for node, blocks in products:
        key = node.scope, node.inputs[1]
        if key not in weights:
            weights[key] = _add_pair(editor, node.scope, node.inputs[1], blocks)
        bias = node.name_input(5)
        out = node.outputs[0]
        product = editor.fresh(f"{node.name}/product") if bias else out
        editor.replace_node(node, "MatMul", [node.inputs[0], weights[key]], [product])
        if bias:
            editor.insert_node(
                node.scope, "Add", [product, bias], [out], name=editor.fresh(f"{node.name}/Add")
            )
    return editor.finish()


def _find_blocks(
    proto: M, read: Callable[[GraphIndex, NodeRef], Blocks | None]
) -> tuple[list[tuple[NodeRef, Blocks]], Editor[M] | None]:
    """The nodes that hold blocks, and an editor of the model at their opset.

    None without such nodes, and where the model cannot be raised to that.
    """
    index = GraphIndex(proto)
    holders = [(node, blocks) for node in index.nodes if (blocks := read(index, node)) is not None]
    try:
        return holders, Editor(ensure_opset(proto, _BLOCKS_OPSET)) if holders else None
    except ModelError:
        # The file is right as it is, and is only looked at.
        return holders, None


def read_lookups(proto: M) -> M:
    """A copy with a DequantizeLinear and a Gather in the place of each GatherBlockQuantized; the model without any.

    See `read_nbits`. A table that MatMulNBits reads, too, gets codes of its own: a product reads them transposed.
    """
    lookups, editor = _find_blocks(proto, _read_table)
    if editor is None:
        return proto
    for node, blocks in lookups:
        inputs = [_add_pair(editor, node.scope, node.inputs[0], blocks), node.inputs[1]]
        editor.replace_node(node, "Gather", inputs, attrs={"axis": node.read_int("gather_axis", 0)})
    return editor.finish()


def _read_table(index: GraphIndex, node: NodeRef) -> Blocks | None:
    """The table of a GatherBlockQuantized, which genai's builder reads in the shape of the projection's weight."""
    if node.op_type != _LOOKUP:
        return None
    reshape = index.maker(node, 0, "Reshape")
    stored = index.find_input(reshape or node)
    codes = index.find_constant(stored)
    kind = index.find_dtype(stored)
    scale = index.input_value(node, 2)
    zero = index.input_value(node, 3)
    bits = node.read_int("bits", 4)
    size = node.read_int("block_size", 128)
    # Its kernel takes constants only.
    if codes is None or scale is None or kind not in _STORED:
        return None
    codes = codes.reshape(len(scale), -1) if reshape else codes
    if kind == TensorProto.UINT8:
        codes = unpack_bits(codes, bits)
        zero = None if zero is None else unpack_bits(zero, bits, scale.shape[-1])
    else:
        # Of typed integers the middle is 0, of unsigned ones, too.
        offset, bits = _STORED[kind]
        zero = np.zeros(scale.shape) if zero is None else zero
        codes, zero = (part.astype(np.uint8) + np.uint8(offset) for part in (codes, zero))
    return Blocks(codes, scale, zero, bits, size, node.read_int("quantize_axis", 1) % scale.ndim)


def _add_pair(editor: Editor[Any], scope: str, stored: str, blocks: Blocks) -> str:
    """Write a DequantizeLinear of this weight; returns the name of its result. stored: name of the file's integers."""
    base = stored.removesuffix(_PACKED).removesuffix("/quantized")
    # 2 bits stand in the type of 4, which opset 21 has; their own needs opset 25.
    storage = TensorProto.UINT8 if blocks.bits == 8 else TensorProto.UINT4
    zero = (
        np.full(blocks.scale.shape, 2 ** (blocks.bits - 1), np.uint8)
        if blocks.zero is None
        else blocks.zero
    )
    # Blocks of zeros, as rows of padding are: any scale has them, and pairs take none of 0.
    dead = blocks.scale == 0
    cut = tuple(map(slice, blocks.codes.shape))
    still, middle = (each.repeat(blocks.size, blocks.axis)[cut] for each in (dead, zero))
    inputs = [
        editor.add_constant(scope, f"{base}/{part}", value, dtype=kind)
        for part, value, kind in (
            ("quantized", np.where(still, middle, blocks.codes), storage),
            ("scale", blocks.scale + dead, None),
            ("zero_point", zero, storage),
        )
    ]
    return add_dequantize(editor, scope, base, inputs, axis=blocks.axis, block_size=blocks.size)


def add_dequantize(
    editor: Editor[Any], scope: str, base: str, inputs: list[str], **attrs: int
) -> str:
    """Write a DequantizeLinear of integers, scale and zero point; the name of its result, which begins with `base`."""
    result = editor.fresh(f"{base}/dequantized")
    name = editor.fresh(f"{base}/{DEQUANTIZE}")
    editor.insert_node(scope, DEQUANTIZE, inputs, [result], name=name, attrs=attrs)
    return result


def _read_product(index: GraphIndex, node: NodeRef) -> Blocks | None:
    if node.op_type != OPERATOR or node.domain != MICROSOFT or node.name_input(4):
        return None
    bits, size, depth, columns = (node.read_int(key, 0) for key in ("bits", "block_size", "K", "N"))
    packed, scale, zero = (index.input_value(node, k) for k in (1, 2, 3))
    # Others are computed, or floats.
    readable = not node.name_input(3) or (zero is not None and zero.dtype == np.uint8)
    if bits not in _WIDTHS or packed is None or scale is None or not readable:
        return None
    count = -(-depth // size)
    codes = unpack_bits(packed.reshape(columns, count, -1), bits, size).reshape(columns, -1)[
        :, :depth
    ]
    zeros = None if zero is None else unpack_bits(zero.reshape(columns, -1), bits, count).T
    return Blocks(codes.T, scale.reshape(columns, count).T, zeros, bits, size)
