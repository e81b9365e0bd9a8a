"""Operators that compute on integers themselves (QLinearConv, MatMulInteger, QGemm …): listed, and never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onnx import TensorProto

from onnxq.graph import GraphIndex, NodeRef

_DOMAINS = ("", "com.microsoft", "com.ms.internal.nhwc", "com.microsoft.nchwc")
_NAMES = re.compile(
    r"(QLinear|QOrdered|DynamicQuantize|MatMulInteger|ConvInteger|MatMulNBits|MatMulBnb4|GatherBlockQuantized).*"
    r"|QGemm|QAttention|QMoE|QEmbedLayerNormalization"
)
_INTEGERS: dict[int, int] = {
    TensorProto.INT8: 8, TensorProto.UINT8: 8, TensorProto.INT16: 16, TensorProto.UINT16: 16,
    TensorProto.INT4: 4, TensorProto.UINT4: 4,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OperatorInfo:
    """One such node. types: the integer types it reads, in the order of its inputs, each once, where they are known.

    bits: of the narrowest of them, or as its attribute `bits` says; 0 when nothing is known.
    """

    node: str
    op: str
    domain: str = ""
    scope: str = ""
    bits: int = 0
    types: tuple[str, ...] = ()


def find_operators(index: GraphIndex) -> tuple[OperatorInfo, ...]:
    """Every operator on integers of every scope, in the order the model runs in."""
    return tuple(
        _info(index, node) for node in index.nodes if node.domain in _DOMAINS and _NAMES.fullmatch(node.op_type)
    )


def _info(index: GraphIndex, node: NodeRef) -> OperatorInfo:
    tensors = [index.resolve(name, node.scope) for name in node.inputs if name]
    read = dict.fromkeys(index.dtype(tensor) for tensor in tensors if tensor is not None)
    kinds = [kind for kind in read if kind in _INTEGERS]
    given = node.attrs.get("bits")
    width = given if isinstance(given, int) else min((_INTEGERS[kind] for kind in kinds), default=0)
    return OperatorInfo(
        node=node.name,
        op=node.op_type,
        domain=node.domain,
        scope=node.scope,
        bits=width or (8 if node.op_type.startswith("DynamicQuantize") else 0),
        types=tuple(TensorProto.DataType.Name(kind).lower() for kind in kinds),
    )
