"""The fewest Casts: nodes between those in float32 that are in float32 with them, by a minimum cut."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator

from onnxq.graph.precision.narrow import CONTROL, DEQUANTIZE, MOVES, is_float32
from onnxq.planner.flow import FlowNetwork
from onnxq.planner.precision.problem import PrecisionProblem
from onnxq.sites import TensorId
from onnxq.spec import FloatType

# What most of the time goes into; it is narrow unless there is a reason.
_HEAVY = frozenset(
    {"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention",
     "GroupQueryAttention"}
)  # fmt: skip
_INFINITE = 1e9
# Share of a Cast that float32 in place of the narrow type costs a node: a few are worth none.
_WIDE_COST, _MOVED_COST = 0.2, 0.05
_WIDE, _NARROW = ("wide",), ("narrow",)
_FLOAT = FloatType.FLOAT32.onnx_type


def cut_casts(problem: PrecisionProblem, kept: Collection[str]) -> frozenset[str]:
    """The kept nodes, and those between that are better in float32 with them.

    A tensor costs a Cast where it is made in one type and read in the other, however many read it.
    """
    net = FlowNetwork()
    net.vertex(_WIDE), net.vertex(_NARROW)
    for name in problem.bindings:
        op_type = problem.index.node(name).op_type
        cost = _INFINITE if op_type in _HEAVY else _MOVED_COST if op_type in MOVES else _WIDE_COST
        if name in kept:
            net.edge(_WIDE, name, _INFINITE)
        else:
            net.edge(name, _NARROW, cost)
    for tensor in _list_tensors(problem):
        maker, readers = _find_maker(problem, tensor), list(_list_readers(problem, tensor))
        if not readers:
            continue
        # A vertex for each of the two Casts: in float32 for its readers there, and in the narrow type.
        up, down = (tensor, "up"), (tensor, "down")
        net.edge(up, maker, 1.0)
        net.edge(maker, down, 1.0)
        for reader in readers:
            net.edge(reader, up, _INFINITE)
            net.edge(down, reader, _INFINITE)
    reached = net.source_side(_WIDE, _NARROW)
    return frozenset(name for name in problem.bindings if net.names[name] in reached)


def _list_tensors(problem: PrecisionProblem) -> Iterator[TensorId]:
    """Computed float32 tensors, without those of DequantizeLinear, which come in the types they are read in."""
    found = [TensorId(value.name) for value in problem.index.inputs]
    for node in problem.index.nodes:
        if node.op_type != DEQUANTIZE:
            found += [TensorId(name, node.scope) for name in node.outputs if name]
    for tensor in found:
        if is_float32(problem.index, tensor) and not problem.index.is_constant(tensor):
            yield tensor


def _find_maker(problem: PrecisionProblem, tensor: TensorId) -> Hashable:
    """The node that makes a tensor, or the side of what has a fixed type."""
    maker = problem.index.producer(tensor)
    if maker is not None:
        return maker.name if maker.name in problem.bindings else _WIDE
    return _find_border(problem, tensor)


def _find_border(problem: PrecisionProblem, tensor: TensorId) -> Hashable:
    given = _FLOAT if tensor.scope else problem.io.get(tensor.name, _FLOAT)
    return _WIDE if given == _FLOAT else _NARROW


def _list_readers(problem: PrecisionProblem, tensor: TensorId) -> Iterator[Hashable]:
    """Who reads the tensor itself, not what is dequantized from it."""
    for edge in problem.index.consumers(tensor):
        binding = problem.bindings.get(edge.node)
        if edge in problem.paired:
            continue
        if binding is None:
            if problem.index.node(edge.node).op_type in CONTROL:
                yield _WIDE
        elif edge.index < len(binding.inputs) and binding.inputs[edge.index] is not None:
            yield edge.node if binding.inputs[edge.index] else _WIDE
    if problem.index.is_output(tensor):
        yield _find_border(problem, tensor)
