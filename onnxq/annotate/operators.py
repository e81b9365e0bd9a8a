"""Operators that compute on integers themselves (QLinearConv, MatMulInteger, QGemm …); they are never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onnx import TensorProto

from onnxq.graph import GraphIndex, NodeRef
from onnxq.graph.values import name_type

# ONNX, and the domains of ONNX Runtime, those of its optimized graphs included.
_DOMAINS = ("", "com.microsoft", "com.ms.internal.nhwc", "com.microsoft.nchwc")
_NAMES = re.compile(
    r"(QLinear|QOrdered|DynamicQuantize|MatMulInteger|ConvInteger|MatMulNBits|MatMulBnb4|GatherBlockQuantized).*"
    r"|QGemm|QAttention|QMoE|QEmbedLayerNormalization"
)
# Operators that quantize their data themselves, always to uint8.
_DYNAMIC = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"})
# Bits of the types that count; int32 and wider are accumulators, shapes and indices.
_INTEGERS: dict[int, int] = {
    TensorProto.INT8: 8, TensorProto.UINT8: 8, TensorProto.INT16: 16, TensorProto.UINT16: 16,
    TensorProto.INT4: 4, TensorProto.UINT4: 4,
}  # fmt: skip


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
    types: tuple[str, ...] = ()


def find_operators(index: GraphIndex) -> tuple[OperatorInfo, ...]:
    """Every operator on integers of every scope, in the order of execution."""
    return tuple(
        _describe_operator(index, node)
        for node in index.nodes
        if node.domain in _DOMAINS and _NAMES.fullmatch(node.op_type)
    )


def _describe_operator(index: GraphIndex, node: NodeRef) -> OperatorInfo:
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
        bits=width or (8 if node.op_type in _DYNAMIC else 0),
        types=tuple(name_type(kind) for kind in kinds),
    )
