"""A calibrated plan and its float model in, the finished Q/DQ model out: one way for quantize and for apply."""

from __future__ import annotations

import onnx

from onnxq.emit import emit_pairs, replace_biases
from onnxq.graph import ModelLike, ensure_opset, verify_graph
from onnxq.graph.half import restore_half
from onnxq.passes.assembly.guards import guard_float
from onnxq.passes.assembly.matmul_bias import unfuse_matmul_bias
from onnxq.passes.state import State
from onnxq.plan import Plan
from onnxq.sites import Role
from onnxq.targets import find_target


def write_pairs(state: State, plan: Plan) -> ModelLike:
    """The plan's pairs alone, for checks with optimizations off: `build_quantized` changes no value beyond them."""
    return emit_pairs(_with_biases(state, plan), plan)


def build_quantized(state: State, plan: Plan) -> ModelLike:
    """Write the plan's pairs, with the nodes that the target needs around them, and check that the graph is legal."""
    proto = _with_biases(state, plan)
    if find_target(plan.target).quantizes_alone:
        proto = unfuse_matmul_bias(proto, _list_quantized_matmuls(plan))
    proto = guard_float(emit_pairs(proto, plan), plan.float_nodes)
    proto = _as_declared(restore_half(proto, state.named), state.named)
    verify_graph(proto, kept=plan.kept)
    return proto


def _with_biases(state: State, plan: Plan) -> ModelLike:
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
    """Consumers of quantized weights whose activations are quantized too, by node name."""
    # Where a plan quantizes activations, it does at every weight; else only pairs that the model came with do.
    read = {edge.node for site in plan.all_sites if site.role is Role.ACTIVATION for edge in site.consumers or ()}
    weights = [edge.node for site in plan.sites if site.role is Role.WEIGHT for edge in site.consumers or ()]
    static = any(site.role is Role.ACTIVATION for site in plan.sites)
    return tuple(name for name in weights if static or name in read)
