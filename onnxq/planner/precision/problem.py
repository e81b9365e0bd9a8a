"""The choice of float types as a problem: a float32 graph, its pairs, and what samples say of its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onnxq.backends import Shapes, Target
from onnxq.graph import GraphIndex, NodeRef
from onnxq.graph.precision.narrow import CONTROL, DEQUANTIZE, QUANTIZE, Binding, bind_types, is_float32
from onnxq.plan import Plan
from onnxq.planner.requests import Requests
from onnxq.sites import Edge, TensorId
from onnxq.spec import FloatType


@dataclass(frozen=True, kw_only=True)
class TensorErrors:
    """Range of a float32 tensor, and errors of narrow types in it, on samples.

    low, high: its range. power: its squares summed. inputs_noise: squared errors of the node that makes it when it
    reads rounded tensors. own_noise: those of rounding the tensor itself. count: elements of the node's first input for
    each of the tensor.
    """

    low: float
    high: float
    power: float
    inputs_noise: float
    own_noise: float
    count: float = 1.0

    @property
    def peak(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def inputs_db(self) -> float:
        """SQNR in dB of the node with rounded inputs; inf where nothing changes."""
        return _compute_db(self.power, self.inputs_noise)

    @property
    def own_db(self) -> float:
        """SQNR in dB of the rounded tensor."""
        return _compute_db(self.power, self.own_noise)


def _compute_db(power: float, noise: float) -> float:
    if noise <= 0:
        return math.inf
    return 10.0 * math.log10(power / noise) if power > 0 and math.isfinite(noise) else -math.inf


@dataclass(frozen=True, eq=False, kw_only=True)
class PrecisionProblem:
    """Everything that the choice of float types depends on.

    index: of the prepared float32 model, with inferred types. plan: its pairs. kind: the narrow type. errors: by
    tensor, {} where nothing could be run. shapes: of computed tensors. io: the type of float inputs and outputs. opset:
    that of the file.
    """

    index: GraphIndex
    plan: Plan
    kind: FloatType
    requests: Requests
    engine: Target
    errors: Mapping[TensorId, TensorErrors]
    shapes: Shapes = field(default_factory=dict)
    io: Mapping[str, int] = field(default_factory=dict)
    opset: int = 19

    @cached_property
    def bindings(self) -> Mapping[str, Binding]:
        """The nodes that have to do with float32 tensors, without pairs and nodes that hold bodies."""
        found: dict[str, Binding] = {}
        for node in self._list_nodes():
            binding = bind_types(self.index, node, self.kind.onnx_type, self.opset)
            # Shape and its like take tensors as they come, and make none.
            if self.writes(node) or any(one is not None for one in binding.inputs):
                found[node.name] = binding
        return found

    def _list_nodes(self) -> Iterator[NodeRef]:
        for node in self.index.nodes:
            pair = not node.domain and node.op_type in (QUANTIZE, DEQUANTIZE, "Constant", *CONTROL)
            if not pair and (self.reads(node) or self.writes(node)):
                yield node

    def reads(self, node: NodeRef) -> list[tuple[int, TensorId]]:
        """The float32 inputs of a node, constants too."""
        found = [(k, self.index.resolve(name, node.scope)) for k, name in enumerate(node.inputs) if name]
        return [(k, tensor) for k, tensor in found if tensor is not None and is_float32(self.index, tensor)]

    def writes(self, node: NodeRef) -> list[TensorId]:
        """The float32 outputs of a node."""
        found = [TensorId(name, node.scope) for name in node.outputs if name]
        return [tensor for tensor in found if is_float32(self.index, tensor)]

    @cached_property
    def paired(self) -> frozenset[Edge]:
        """Inputs that read a dequantized tensor, which comes in the type they compute in."""
        found: set[Edge] = set()
        for site in self.plan.all_sites:
            if site.consumers is not None:
                found.update(site.consumers)
            elif isinstance(site.site, TensorId):
                found.update(self.index.consumers(site.site))
        return frozenset(found)
