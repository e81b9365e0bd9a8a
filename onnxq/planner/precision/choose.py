"""Which nodes compute in a narrow float type, float16 or bfloat16, where no pair is; all others stay in float32."""

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from onnxq.graph.base import DEQUANTIZE
from onnxq.graph.precision.narrow import CONTROL, MOVES, is_float32
from onnxq.plan import KeepReason, KeptFloat32, Plan, PrecisionPlan
from onnxq.planner.build import OnnxPlacement, find_node_ids
from onnxq.planner.cut import FlowNetwork
from onnxq.planner.precision.reasons import PrecisionProblem, ReasonSearch, round_figure
from onnxq.sites import NameSet, TensorId
from onnxq.spec import FloatType

# What most of the time goes into; it is narrow unless there is a reason.
_HEAVY = (
    "Conv",
    "ConvTranspose",
    "MatMul",
    "Gemm",
    "Einsum",
    "LSTM",
    "GRU",
    "RNN",
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
)
_INFINITE = 1e9
# Share of a Cast that float32 in place of the narrow type costs a node: a few are worth none.
_WIDE_COST = 0.2
_MOVED_COST = 0.05
_WIDE = ("wide",)
_NARROW = ("narrow",)
_FLOAT = FloatType.FLOAT32.onnx_type


def cut_casts(problem: PrecisionProblem, kept: Collection[str]) -> NameSet:
    """The kept nodes, and those between that are better in float32 with them.

    A tensor costs a Cast where it is made in one type and read in the other, however many read it.
    """
    net = FlowNetwork()
    for name in problem.bindings:
        op_type = problem.index.find_node(name).op_type
        cost = _INFINITE if op_type in _HEAVY else _MOVED_COST if op_type in MOVES else _WIDE_COST
        if name in kept:
            net.add_edge(_WIDE, name, _INFINITE)
        else:
            net.add_edge(name, _NARROW, cost)
    for tensor in _list_computed(problem):
        maker = _find_maker(problem, tensor)
        readers = list(_list_readers(problem, tensor))
        if not readers:
            continue
        # A vertex for each of the two Casts: in float32 for its readers there, and in the narrow type.
        up = (tensor, "up")
        down = (tensor, "down")
        net.add_edge(up, maker, 1.0)
        net.add_edge(maker, down, 1.0)
        for reader in readers:
            net.add_edge(reader, up, _INFINITE)
            net.add_edge(down, reader, _INFINITE)
    reached = net.source_side(_WIDE, _NARROW)
    return frozenset(name for name in problem.bindings if net.names[name] in reached)


def _list_computed(problem: PrecisionProblem) -> Iterator[TensorId]:
    """Computed float32 tensors, without those of DequantizeLinear, which come in the types they are read in."""
    tensors = [TensorId(value.name) for value in problem.index.inputs]
    for node in problem.index.nodes:
        if node.op_type != DEQUANTIZE:
            tensors += node.results
    for tensor in tensors:
        if is_float32(problem.index, tensor) and not problem.index.is_constant(tensor):
            yield tensor


def _find_maker(problem: PrecisionProblem, tensor: TensorId) -> Hashable:
    """The node that makes a tensor, or the side of what has a fixed type."""
    maker = problem.index.find_producer(tensor)
    if maker is not None:
        return maker.name if maker.name in problem.bindings else _WIDE
    return _find_border(problem, tensor)


def _find_border(problem: PrecisionProblem, tensor: TensorId) -> Hashable:
    dtype = _FLOAT if tensor.scope else problem.io.get(tensor.name, _FLOAT)
    return _WIDE if dtype == _FLOAT else _NARROW


def _list_readers(problem: PrecisionProblem, tensor: TensorId) -> Iterator[Hashable]:
    """Who reads the tensor itself, not what is dequantized from it."""
    for edge in problem.index.list_consumers(tensor):
        binding = problem.bindings.get(edge.node)
        if edge in problem.paired:
            continue
        if binding is None:
            if problem.index.find_node(edge.node).op_type in CONTROL:
                yield _WIDE
        elif edge.index < len(binding.inputs) and binding.inputs[edge.index] is not None:
            yield edge.node if binding.inputs[edge.index] else _WIDE
    if problem.index.is_output(tensor):
        yield _find_border(problem, tensor)


def choose_types(
    problem: PrecisionProblem, *, more: Mapping[str, KeptFloat32] | None = None
) -> PrecisionPlan:
    """The float types of every node. more: nodes to keep in float32 besides."""
    search = ReasonSearch(problem)
    reasons = {**search.find_kept(), **(more or {})}
    wide = cut_casts(problem, reasons)
    narrow = [name for name in problem.bindings if name not in wide]
    limited = tuple(
        edge for name in narrow for edge in search.list_limited(problem.index.find_node(name))
    )
    return PrecisionPlan(
        type=problem.kind,
        nodes=sum(bool(problem.list_writes(problem.index.find_node(name))) for name in narrow),
        kept=tuple(
            reasons.get(name, KeptFloat32(node=name, reason=KeepReason.CASTS))
            for name in problem.bindings
            if name in wide
        ),
        limited=limited,
    )


def find_suspects(problem: PrecisionProblem, chosen: PrecisionPlan) -> Iterable[KeptFloat32]:
    """The narrow nodes, those first whose results suffer most, to be kept in float32 where the whole loses too much."""
    wide = {node.node for node in chosen.kept}
    worst: dict[str, float] = {}
    for tensor, errors in problem.errors.items():
        maker = problem.index.find_producer(tensor)
        if maker is not None and maker.name in problem.bindings and maker.name not in wide:
            worst[maker.name] = min(
                errors.inputs_db, errors.own_db, worst.get(maker.name, math.inf)
            )
    order = sorted(worst, key=lambda name: (worst[name], name))
    return [
        KeptFloat32(node=name, reason=KeepReason.TRIAL, figure=round_figure(worst[name]))
        for name in order
    ]


# From these opsets on QuantizeLinear takes float16, and convolutions bfloat16.
_FLOAT16_OPSET = 19
_BFLOAT16_OPSET = 22


def find_type_opset(plan: Plan, kind: FloatType) -> int:
    """The lowest opset in which the plan can be written with this float type."""
    if kind is FloatType.BFLOAT16:
        return _BFLOAT16_OPSET
    return _FLOAT16_OPSET if plan.all_sites and kind is FloatType.FLOAT16 else 0


def add_precision(plan: Plan, chosen: PrecisionPlan, placement: OnnxPlacement | None) -> Plan:
    """The plan with these types, in an opset that has pairs of them, and the structural ids of the nodes they name."""
    opset = max(plan.opset, find_type_opset(plan, chosen.type))
    names = [*(node.node for node in chosen.kept), *(edge.node for edge in chosen.limited)]
    ids = {} if placement is None else find_node_ids(placement.index, names, placement.ids)
    return replace(plan, precision=chosen, opset=opset, nodes={**plan.nodes, **ids})
