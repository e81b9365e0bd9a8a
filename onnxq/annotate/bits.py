"""Reading the number of bits of a pair, from the most to the least trustworthy sign.

Metadata of onnxq, the attribute `bits`, the type where it says it all (int4, int2, float8, int32), the bounds of a
Clip, the levels a stored weight uses, and at last the width of the container.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.annotate.find import Chain
from onnxq.annotate.model import Origin
from onnxq.graph import GraphIndex, NodeRef
from onnxq.numerics import quantize
from onnxq.sites import TensorId
from onnxq.spec import ElementType, Granularity, PerBlock, PerChannel, PerTensor, QParams, QuantSpec, find_element_type

# Fewer values say nothing about the width that was meant.
ENOUGH_VALUES = 16
_CONTAINERS = ("int8", "uint8", "int16", "uint16")
# How far from a whole level a bound may lie, relative to it: float16 bounds carry 11 bits.
_LEVEL_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Numbers:
    """Scale and zero point of a chain; None when computed at run time. storage: e.g. "int8", "" when unknown."""

    scale: NDArray[Any] | None
    zero_point: NDArray[np.int64] | None
    storage: str
    granularity: Granularity

    @property
    def element_type(self) -> ElementType:
        """The width and the sign of the type."""
        return find_element_type(self.storage)


def numbers_of(index: GraphIndex, chain: Chain) -> Numbers:
    """Read scale, zero point, type and granularity of a chain."""
    node = chain.dequantize or chain.last
    scale = _constant(index, node, 1)
    zero = _constant(index, node, 2)
    return Numbers(
        scale=None if scale is None else np.asarray(scale, np.float64),
        zero_point=None if zero is None else _integers(zero),
        storage=_storage(index, chain),
        granularity=_granularity(index, node, scale),
    )


def read_bits(
    index: GraphIndex,
    chain: Chain,
    numbers: Numbers,
    *,
    noted: tuple[int, Origin] | None,
    levels: tuple[int, int] | None,
) -> tuple[int, Origin]:
    """The bits of a chain and what they were read from.

    noted: what onnxq wrote down, if it did. levels: as `levels_used` gives them.
    """
    width = numbers.element_type.bits
    if noted is not None and noted[0] <= width:
        return noted
    written = [node.attrs["bits"] for node in chain.nodes if isinstance(node.attrs.get("bits"), int)]
    if written and 1 <= written[0] <= width:
        return int(written[0]), Origin.ATTRIBUTE
    if numbers.storage not in _CONTAINERS:
        return width, Origin.TYPE
    clipped = clip_bits(index, chain, numbers)
    if clipped is not None and clipped < width:
        return clipped, Origin.CLIP
    if levels is not None and _count(index, chain) >= ENOUGH_VALUES:
        used = bits_for(*levels, signed=numbers.element_type.signed)
        if used < width:
            return used, Origin.VALUES
    return width, Origin.TYPE


def clip_bits(index: GraphIndex, chain: Chain, numbers: Numbers) -> int | None:
    """Bits promised by the Clip on integers (QCDQ) or by the one on floats in front; None without such a promise."""
    if chain.inner is not None and chain.inner.op_type == "Clip":
        bounds = _bounds(index, chain.inner)
        if bounds is not None:
            return max(2, math.ceil(math.log2(bounds[1] - bounds[0] + 1)))
    if chain.outer is not None:
        return _float_clip_bits(index, chain.outer, numbers)
    return None


def is_quantizer_clip(index: GraphIndex, chain: Chain, numbers: Numbers) -> bool:
    """True when the float Clip in front belongs to the quantizer: its bounds are exactly the levels of a width.

    A ReLU6 in front of a quantize node fills the container and belongs to the network.
    """
    return chain.outer is not None and _float_clip_bits(index, chain.outer, numbers) is not None


def _float_clip_bits(index: GraphIndex, clip: NodeRef, numbers: Numbers) -> int | None:
    bounds, scale = _bounds(index, clip), numbers.scale
    if bounds is None or scale is None or scale.size != 1 or not float(scale.flat[0]) > 0:
        return None
    zero = 0 if numbers.zero_point is None else int(numbers.zero_point.flat[0])
    low, high = (bound / float(scale.flat[0]) + zero for bound in bounds)
    if not all(math.isfinite(x) and abs(x - round(x)) <= _LEVEL_TOLERANCE * max(16, abs(x)) for x in (low, high)):
        return None
    width, signed = numbers.element_type.bits, numbers.element_type.signed
    for bits in range(2, width + 1):
        bottom, top = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        narrow = signed and round(low) == bottom + 1
        if round(high) == top and (round(low) == bottom or narrow) and (bits < width or narrow):
            return bits
    return None


def levels_used(index: GraphIndex, chain: Chain, numbers: Numbers) -> tuple[int, int] | None:
    """Lowest and highest integer level of a constant; None for anything else (FP8 too), or only zeros."""
    if numbers.element_type.is_float or chain.source is None or not index.is_constant(chain.source):
        return None
    value = index.constant(chain.source)
    if value is None:
        return None
    levels = _integers(value) if chain.quantize is None else _quantized(value, numbers)
    if levels is None or not levels.any():
        return None
    return int(levels.min()), int(levels.max())


def _count(index: GraphIndex, chain: Chain) -> int:
    shape = None if chain.source is None else index.shape(chain.source)
    return math.prod(dim for dim in shape if isinstance(dim, int)) if shape is not None else 0


def bits_for(low: int, high: int, *, signed: bool) -> int:
    """The narrowest type of 2 bits or more that holds both levels."""
    for bits in range(2, 64):
        bottom, top = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        if bottom <= low and high <= top:
            return bits
    return 64


def _quantized(value: NDArray[Any], numbers: Numbers) -> NDArray[np.int64] | None:
    """Levels of a float constant in front of a quantize node."""
    if numbers.scale is None or not (numbers.scale > 0).all() or not np.isfinite(value).all():
        return None
    width, signed = numbers.element_type.bits, numbers.element_type.signed
    spec = QuantSpec(bits=width, signed=signed, symmetric=False, granularity=numbers.granularity)
    zero = np.zeros(numbers.scale.shape, np.int32) if numbers.zero_point is None else numbers.zero_point
    qparams = QParams(numbers.scale.astype(np.float32), zero.astype(np.int32))
    return np.asarray(quantize(value, qparams, spec), np.int64)


def _bounds(index: GraphIndex, clip: NodeRef) -> tuple[float, float] | None:
    found = []
    for position, name in ((1, "min"), (2, "max")):
        value = _constant(index, clip, position)
        held = clip.attrs.get(name) if value is None else value
        if held is None or np.size(held) != 1:
            return None
        found.append(float(np.asarray(held).reshape(())))
    return (found[0], found[1]) if found[0] < found[1] else None


def _constant(index: GraphIndex, node: NodeRef, position: int) -> NDArray[Any] | None:
    if position >= len(node.inputs) or not node.inputs[position]:
        return None
    tensor = index.resolve(node.inputs[position], node.scope)
    return None if tensor is None else index.constant(tensor)


def _integers(array: NDArray[Any]) -> NDArray[np.int64]:
    # int4 and friends come as ml_dtypes, which cast to int64 but do not compare with it.
    return np.asarray(array).astype(np.float64).astype(np.int64) if array.dtype.kind == "V" else array.astype(np.int64)


def _storage(index: GraphIndex, chain: Chain) -> str:
    """The type from the zero point, the stored tensor, or what quantize makes without one."""
    if chain.inner is not None and chain.inner.op_type == "Cast":
        return _dtype(index, chain.source)
    for node in (chain.dequantize, chain.quantize):
        if node is not None and len(node.inputs) > 2 and node.inputs[2]:
            found = _dtype(index, index.resolve(node.inputs[2], node.scope))
            if found:
                return found
    if chain.quantize is not None:
        wanted = int(chain.quantize.attrs.get("output_dtype", 0))
        return _dtype_name(wanted) if wanted else "uint8"
    return _dtype(index, chain.source) or "uint8"


def _dtype(index: GraphIndex, tensor: TensorId | None) -> str:
    number = 0 if tensor is None else index.dtype(tensor)
    return _dtype_name(number) if number else ""


def _dtype_name(number: int) -> str:
    return TensorProto.DataType.Name(number).lower() if number in TensorProto.DataType.values() else f"type{number}"


def _granularity(index: GraphIndex, node: NodeRef, scale: NDArray[Any] | None) -> Granularity:
    shape: tuple[Any, ...] | None = None if scale is None else scale.shape
    if shape is None and len(node.inputs) > 1:
        tensor = index.resolve(node.inputs[1], node.scope)
        shape = None if tensor is None else index.shape(tensor)
    block = int(node.attrs.get("block_size", 0))
    axis = int(node.attrs.get("axis", 1))
    if block > 0:
        return PerBlock(axis, block)
    return PerChannel(axis) if shape and len(shape) == 1 and shape[0] != 1 else PerTensor()


def noted_bits(record: Mapping[str, Any] | None) -> int | None:
    """The `bits` of a metadata record, when it is a sane number."""
    text = str((record or {}).get("bits", ""))
    return int(text) if text.isdecimal() and len(text) <= 2 and 1 <= int(text) <= 64 else None
