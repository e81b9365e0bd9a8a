"""The float types of a plan written into its model, after everything else: nothing follows that would have to know."""

from __future__ import annotations

from onnxq.graph import ModelLike
from onnxq.graph.precision.narrow import write_types
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
        interface = dict.fromkeys(sorted(floats), types.io.onnx_type)
    if types is None or types.type is FloatType.FLOAT32:
        narrow = FLOAT_TYPES.get(source.computes, FloatType.FLOAT16)
        return write_types(proto, narrow.onnx_type, None, interface=interface) if interface else proto
    # Pairs that the model came with keep their numbers, which are float32.
    wide = {*(one.node for one in types.kept), *plan.kept}
    return write_types(proto, types.type.onnx_type, wide, limited=types.limited, interface=interface)
