"""A calibrated plan and its float model in, the finished Q/DQ model out: one way for quantize and for apply."""

from __future__ import annotations

import onnx

from onnxq.backends import find_target
from onnxq.emit import emit_pairs, emit_types, replace_biases
from onnxq.graph import ModelLike, ensure_opset, verify_graph
from onnxq.graph.integer_products import write_integer_products
from onnxq.graph.nbits import write_nbits
from onnxq.graph.precision.narrow import write_types
from onnxq.graph.precision.widen import restore_stored
from onnxq.passes.assembly.guards import guard_float, unfuse_matmul_bias
from onnxq.passes.state import FloatState
from onnxq.plan import Plan
from onnxq.plan.names import name_part
from onnxq.progress import Progress, silent
from onnxq.sites import Role
from onnxq.spec import FloatType


def write_pairs(state: FloatState, plan: Plan) -> ModelLike:
    """The plan's pairs alone, for checks with optimizations off: `build_quantized` changes no value beyond them."""
    return emit_pairs(_with_biases(state, plan), plan)


def build_quantized(state: FloatState, plan: Plan) -> ModelLike:
    """Write the plan's pairs, with the nodes that the target needs around them, and check that the graph is legal.

    All floats are float32, inputs and outputs too: for trials and times in ONNX Runtime.
    """
    proto = _as_declared(_write_operators(_write_all(state, plan), plan), state.named)
    verify_graph(proto, kept=plan.kept)
    return proto


def build_file(state: FloatState, plan: Plan, progress: Progress = silent) -> ModelLike:
    """The finished model: `build_quantized` with the plan's float types, inputs and outputs in theirs, checked."""
    typed = _write_operators(emit_types(_write_all(state, plan, progress), plan, state.types), plan)
    proto = restore_stored(typed, state.types.stored)
    proto = _as_declared(proto, state.named)
    verify_graph(proto, kept=plan.kept)
    return proto


def _write_all(state: FloatState, plan: Plan, progress: Progress = silent) -> ModelLike:
    proto = _with_biases(state, plan)
    if find_target(plan.target).quantizes_alone:
        proto = unfuse_matmul_bias(proto, _list_quantized_matmuls(plan))
    return write_integer_products(guard_float(emit_pairs(proto, plan, progress), plan.float_nodes))


def _write_operators(proto: ModelLike, plan: Plan) -> ModelLike:
    """The model with the operators that the plan asks for in the place of pairs, last, when floats have their types."""
    if plan.nbits is None:
        return proto
    bits = {name_part(site.site, "dq_node"): site.spec.bits for site in plan.sites if site.role is Role.WEIGHT}
    return write_nbits(proto, plan.nbits, bits)


def give_types(state: FloatState, model: ModelLike) -> ModelLike:
    """The float32 model with inputs and outputs as a person's function expects them: in the types that it came in.

    Where some are bfloat16 all stay float32: ONNX Runtime takes no bfloat16 from numpy.
    """
    kinds = set(state.types.interface.values())
    if not kinds or FloatType.BFLOAT16.onnx_type in kinds:
        return model
    return write_types(model, FloatType.FLOAT16.onnx_type, None, interface=state.types.interface)


def _with_biases(state: FloatState, plan: Plan) -> ModelLike:
    return replace_biases(ensure_opset(state.model, plan.opset), plan)


def _as_declared(proto: ModelLike, original: ModelLike) -> ModelLike:
    """Only the types the model declared itself: inferred ones let ORT fuse more, and not for the better."""
    declared = {value.name for value in original.graph.value_info}
    kept = [value for value in proto.graph.value_info if value.name in declared]
    if len(kept) < len(proto.graph.value_info):
        copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(copies)
    return proto


def _list_quantized_matmuls(plan: Plan) -> tuple[str, ...]:
    """Consumers of quantized weights whose activations are quantized too, on scales in the file, by node name."""
    # Where a plan quantizes activations, it does at every weight; else only pairs that the model came with do.
    read = {edge.node for site in plan.all_sites if site.role is Role.ACTIVATION for edge in site.consumers or ()}
    # These become operators on integers, whose bias ORT takes into the kernel in any form.
    dynamic = {edge.node for site in plan.sites if site.spec.dynamic for edge in site.consumers or ()}
    weights = [edge.node for site in plan.sites if site.role is Role.WEIGHT for edge in site.consumers or ()]
    static = any(site.role is Role.ACTIVATION for site in plan.sites)
    return tuple(name for name in weights if (static or name in read) and name not in dynamic)
