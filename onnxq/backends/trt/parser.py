"""Operators that TensorRT's parser does not take, of those that exporters and ONNX Runtime's optimizer write.

Proved with the parser of TensorRT-RTX 1.7: tests/backends/trt/test_parser.py asks it again.
"""

from __future__ import annotations

from onnxq.graph import NodeRef

_MICROSOFT = "com.microsoft"
# Of com.microsoft. Another of these is looked for among the plugins.
TAKEN = frozenset(
    {"Gelu", "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "RotaryEmbedding",
     "SkipSimplifiedLayerNormalization"}
)  # fmt: skip
_UNKNOWN = (
    "it knows this operator of ONNX Runtime only as a plugin; export the network without fusing it for ONNX Runtime"
)


def refuse_float(node: NodeRef) -> str:
    """Why TensorRT's parser does not take a node, whatever its type; "" where it does, or a plugin may."""
    if node.domain == _MICROSOFT:
        if node.op_type == "GroupQueryAttention" and not float(node.attrs.get("scale", 0.0)):
            return "it asks for the attribute `scale`, which the node leaves to the default"
        return "" if node.op_type in TAKEN else _UNKNOWN
    if node.op_type == "Attention" and not node.domain and any(node.outputs[1:]):
        return "it takes attention with one output only; caches belong into Concats in front of it"
    return ""
