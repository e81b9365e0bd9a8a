"""Quantizable operators: the nodes a target could run quantized, each with the activation that folds into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from onnxq.graph import Graph, NodeRef
from onnxq.plan import Bound
from onnxq.planner.existing import NOTHING, Existing
from onnxq.sites import Edge, Role, TensorId, Unquantized
from onnxq.targets import Candidate, Output, PlacementRule, Shapes, Target

# The rule that refusals name where pairs that the model came with decide.
KEPT = "kept"


@dataclass(frozen=True, eq=False)
class QuantizableOp:
    """A node with the rule that places its pairs.

    data: activation edges with the tensors they read; out: the tensor whose pair closes it
    (behind `activation` where one folds in); bound: on that activation's values.
    """

    node: NodeRef
    rule: PlacementRule
    data: tuple[tuple[Edge, TensorId], ...]
    out: TensorId
    activation: NodeRef | None = None
    bound: Bound = (None, None)

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def weight(self) -> Edge | None:
        return None if self.rule.weight is None else Edge(self.node.name, self.rule.weight, self.node.scope)

    @property
    def bias(self) -> Edge | None:
        k = self.rule.bias
        if k is None or k >= len(self.node.inputs) or not self.node.inputs[k]:
            return None
        return Edge(self.node.name, k, self.node.scope)


@dataclass(frozen=True, eq=False)
class QuantizableOps:
    """All quantizable operators of a model, in topological order, and the reasons why other nodes are none.

    index: the graph, without the pairs it came with. complete: those that such pairs quantize already, as the engine
    needs it. partial: those that stay as they are though only some of their tensors have pairs.
    """

    index: Graph
    shapes: Shapes
    units: tuple[QuantizableOp, ...]
    reasons: tuple[Unquantized, ...]
    by_name: dict[str, QuantizableOp] = field(default_factory=dict)
    by_out: dict[TensorId, QuantizableOp] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    existing: Existing = NOTHING
    complete: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()

    def candidate(self, node: NodeRef) -> Candidate:
        """The node with the facts that rules may ask for."""
        return Candidate(node, self.index, self.shapes)

    def consumers(self, tensor: TensorId) -> tuple[tuple[Edge, QuantizableOp | None], ...]:
        """Who reads the tensor, and as which operator's activation (None: as something that stays float)."""
        found = []
        for edge in self.index.consumers(tensor):
            unit = self.by_name.get(edge.node)
            reads = unit is not None and any(edge == own for own, _ in unit.data)
            found.append((edge, unit if reads else None))
        return tuple(found)


def list_roles(units: QuantizableOps, unit: QuantizableOp) -> list[tuple[Role, TensorId]]:
    """The tensors a unit needs quantized, with their roles."""
    found = [(Role.ACTIVATION, tensor) for _, tensor in unit.data]
    if unit.weight is not None:
        tensor = units.index.resolve(unit.node.inputs[unit.weight.index], unit.node.scope)
        if tensor is not None:
            found.append((Role.WEIGHT, tensor))
    return found


def find_quantizable_ops(
    index: Graph,
    target: Target,
    shapes: Shapes,
    *,
    closed: Callable[[NodeRef], bool] = lambda _: False,
    existing: Existing = NOTHING,
) -> QuantizableOps:
    """Every node some rule of the target could quantize.

    index: of `existing.view`, where there are pairs. closed: nodes to leave alone (in loop bodies, in branches that
    calibration cannot reach). Compute nodes that no rule takes come back with their reasons.
    """
    units: list[QuantizableOp] = []
    reasons: list[Unquantized] = []
    kept = _find_nodes_at_existing_pairs(index)
    for node in index.nodes:
        if closed(node) or node.name in kept:
            continue
        candidate = Candidate(node, index, shapes)
        rule, reason = target.rule_for(candidate)
        if reason is not None and node.name not in existing.weighted:
            reasons.append(reason)
        if rule is not None:
            unit = _make_op(candidate, rule)
            if unit is not None:
                units.append(unit)
    by_out = {unit.out: unit for unit in units}
    folded = frozenset(unit.activation.name for unit in units if unit.activation is not None)
    complete = frozenset(unit.name for unit in units if _is_complete(unit, existing))
    partial = frozenset(unit.name for unit in units if unit.name in existing.weighted) - complete
    by_name = {unit.name: unit for unit in units}
    return QuantizableOps(
        index, shapes, tuple(units), tuple(reasons), by_name, by_out, folded, existing, complete, partial
    )  # fmt: skip


def _is_complete(unit: QuantizableOp, existing: Existing) -> bool:
    """True when the pairs that the model came with are all that the operator's kernel needs."""
    if not unit.data or any(edge not in existing.direct or edge not in existing.by_edge for edge, _ in unit.data):
        return False
    if unit.weight is not None and unit.weight not in existing.direct:
        return False
    return unit.rule.output is not Output.PAIR or unit.out in existing.by_tensor


def _find_nodes_at_existing_pairs(index: Graph) -> frozenset[str]:
    """Nodes at a DequantizeLinear or QuantizeLinear that nobody can share: they are somebody's work, and kept."""
    kept: set[str] = set()
    for node in index.nodes:
        if node.op_type == "DequantizeLinear":
            out = TensorId(node.outputs[0], node.scope)
            kept.update(edge.node for edge in index.consumers(out))
        if node.op_type == "QuantizeLinear":
            source = index.resolve(node.inputs[0], node.scope)
            producer = None if source is None else index.producer(source)
            if producer is not None:
                kept.add(producer.name)
    return frozenset(kept)


def _make_op(candidate: Candidate, rule: PlacementRule) -> QuantizableOp | None:
    node = candidate.node
    indices = rule.data or tuple(k for k in range(len(node.inputs)) if not candidate.is_constant(k))
    if rule.inputs is not None:
        indices = rule.inputs(candidate)
    data = []
    for k in indices:
        tensor = candidate.tensor(k)
        if tensor is None:
            return None
        data.append((Edge(node.name, k, node.scope), tensor))
    out = TensorId(node.outputs[0], node.scope)
    out = rule.closes(candidate) or out
    activation, bound = _find_fused_activation(candidate, rule, out)
    if activation is not None:
        out = TensorId(activation.outputs[0], activation.scope)
    return QuantizableOp(node, rule, tuple(data), out, activation, bound)


def _find_fused_activation(candidate: Candidate, rule: PlacementRule, out: TensorId) -> tuple[NodeRef | None, Bound]:
    """The activation that only this node feeds, and its bounds."""
    index = candidate.index
    consumers = index.consumers(out)
    if len(consumers) != 1 or index.is_output(out) or consumers[0].scope != out.scope or consumers[0].index != 0:
        return None, (None, None)
    node = index.node(consumers[0].node)
    if node.op_type not in rule.fuses or node.domain not in ("", "ai.onnx"):
        return None, (None, None)
    bound = read_clip_bound(Candidate(node, index, candidate.shapes))
    return (node, bound) if bound is not None else (None, (None, None))


def read_clip_bound(candidate: Candidate) -> Bound | None:
    """Bounds of a Relu or Clip that an asymmetric range holding zero can express; None if it cannot."""
    if candidate.node.op_type == "Relu":
        return (0.0, None)
    bounds: list[float | None] = []
    for k, name in ((1, "min"), (2, "max")):
        value = candidate.constant(k)
        if value is None and candidate.tensor(k) is not None:
            return None
        attribute = candidate.attr(name, None)
        bounds.append(float(value.reshape(-1)[0]) if value is not None else attribute)
    low, high = bounds
    if (low is not None and low > 0) or (high is not None and high < 0):
        return None
    return (low, high)
