"""The float types of a plan written into its model, after everything else: nothing follows that would have to know."""

from __future__ import annotations

from onnxq.graph import GraphIndex, ModelLike, NodeRef, get_index
from onnxq.graph.precision.narrow import DEQUANTIZE, QUANTIZE, is_exact, write_types
from onnxq.graph.precision.widen import SourceTypes
from onnxq.plan import Plan
from onnxq.spec import FLOAT_TYPES, FloatType


def emit_types(proto: ModelLike, plan: Plan, source: SourceTypes) -> ModelLike:
    """The float32 model with the plan's float types, and inputs and outputs in theirs.

    source: the types that the model came in, which its inputs and outputs keep where the plan says nothing else.
    """
    types, interface = plan.precision, dict(source.interface)
    if types is not None and types.io is not None:
        values = (*proto.graph.input, *proto.graph.output)
        floats = {value.name for value in values if value.type.tensor_type.elem_type == FloatType.FLOAT32.onnx_type}
        interface.update(dict.fromkeys(sorted(floats - source.fixed), types.io.onnx_type))
    if types is None or types.type is FloatType.FLOAT32:
        came = FLOAT_TYPES.get(source.computes, FloatType.FLOAT16)
        return write_types(proto, came.onnx_type, None, interface=interface) if interface else proto
    narrow, index = types.type, get_index(proto)
    # Pairs that the model came with keep their numbers.
    pairs = (index.node(name) for name in plan.kept)
    wide = {*(one.node for one in types.kept), *(one.name for one in pairs if not _is_same(index, one, narrow))}
    return write_types(proto, narrow.onnx_type, wide, limited=types.limited, interface=interface)


def _is_same(index: GraphIndex, node: NodeRef, kind: FloatType) -> bool:
    """True for half a pair whose scales are in this type what they are in float32."""
    scale = index.input_value(node, 1) if node.op_type in (QUANTIZE, DEQUANTIZE) and not node.domain else None
    return scale is not None and is_exact(scale, kind.onnx_type)
