"""Quantizable operators: the nodes a target could run quantized, each with the activation that folds into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from onnxq.backends import Candidate, Output, PlacementRule, Shapes, Target
from onnxq.graph import Graph, NodeRef
from onnxq.plan import Bound
from onnxq.planner.existing import NOTHING, Existing
from onnxq.sites import Edge, Role, TensorId, Unquantized

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
        """The name of the node."""
        return self.node.name

    @property
    def weight(self) -> Edge | None:
        """The input that is the weight; None without one."""
        return None if self.rule.weight is None else Edge(self.node.name, self.rule.weight, self.node.scope)

    @property
    def weights(self) -> tuple[Edge, ...]:
        """The inputs of all constant weights."""
        indices = () if self.rule.weight is None else (self.rule.weight, *self.rule.more_weights)
        return tuple(Edge(self.node.name, k, self.node.scope) for k in indices)

    @property
    def bias(self) -> Edge | None:
        """The input that is the bias; None without one."""
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
    all: tuple[QuantizableOp, ...]
    reasons: tuple[Unquantized, ...]
    existing: Existing
    complete: frozenset[str]
    partial: frozenset[str]

    @cached_property
    def by_name(self) -> dict[str, QuantizableOp]:
        """Each operator by its name."""
        return {op.name: op for op in self}

    @cached_property
    def by_out(self) -> dict[TensorId, QuantizableOp]:
        """Each operator by the tensor that its closing pair stands on."""
        return {op.out: op for op in self}

    def __iter__(self) -> Iterator[QuantizableOp]:
        return iter(self.all)

    def candidate(self, node: NodeRef) -> Candidate:
        """The node with the facts that rules may ask for."""
        return Candidate(node, self.index, self.shapes)

    def consumers(self, tensor: TensorId) -> tuple[tuple[Edge, QuantizableOp | None], ...]:
        """Who reads the tensor, and as which operator's activation (None: as something that stays float)."""
        readers = ((edge, self.by_name.get(edge.node)) for edge in self.index.consumers(tensor))
        return tuple(
            (edge, op if op is not None and any(edge == own for own, _ in op.data) else None) for edge, op in readers
        )

    def list_roles(self, op: QuantizableOp) -> list[tuple[Role, TensorId]]:
        """The tensors that an operator needs quantized, with their roles."""
        weights = (self.candidate(op.node).tensor(edge.index) for edge in op.weights)
        roles = [(Role.ACTIVATION, tensor) for _, tensor in op.data]
        return roles + [(Role.WEIGHT, weight) for weight in weights if weight is not None]


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
    ops: list[QuantizableOp] = []
    reasons: list[Unquantized] = []
    kept = _find_nodes_at_existing_pairs(index)
    for node in index.nodes:
        if closed(node) or node.name in kept:
            continue
        candidate = Candidate(node, index, shapes)
        rule, reason = target.rule_for(candidate)
        # A weight that is stored in integers has no kernel of its own, which is no news to who stored it so.
        if reason is not None and node.name not in existing.weighted:
            reasons.append(reason)
        op = None if rule is None else _make_op(candidate, rule)
        if op is not None:
            ops.append(op)
    complete = frozenset(op.name for op in ops if _is_complete(op, existing))
    partial = existing.weighted.intersection(op.name for op in ops) - complete
    return QuantizableOps(index, shapes, tuple(ops), tuple(reasons), existing, complete, partial)


def _is_complete(op: QuantizableOp, existing: Existing) -> bool:
    """True when the pairs that the model came with are all that the operator's kernel needs."""
    if not op.data or any(edge not in existing.direct or edge not in existing.by_edge for edge, _ in op.data):
        return False
    if op.weight is not None and op.weight not in existing.direct:
        return False
    return op.rule.output is not Output.PAIR or op.out in existing.by_tensor


def _find_nodes_at_existing_pairs(index: Graph) -> frozenset[str]:
    """Nodes at a DequantizeLinear or QuantizeLinear that nobody can share: they are somebody's work, and kept."""
    kept: set[str] = set()
    for node in index.nodes:
        if node.op_type == "DequantizeLinear":
            kept.update(edge.node for edge in index.consumers(node.result))
        source = index.resolve(node.inputs[0], node.scope) if node.op_type == "QuantizeLinear" else None
        maker = None if source is None else index.producer(source)
        kept.update([] if maker is None else [maker.name])
    return frozenset(kept)


def _make_op(candidate: Candidate, rule: PlacementRule) -> QuantizableOp | None:
    node = candidate.node
    indices = rule.data or tuple(k for k in range(len(node.inputs)) if not candidate.is_constant(k))
    if rule.inputs is not None:
        indices = rule.inputs(candidate)
    found = [(Edge(node.name, k, node.scope), candidate.tensor(k)) for k in indices]
    data = tuple((edge, tensor) for edge, tensor in found if tensor is not None)
    # A kernel needs all of its inputs: one that the node leaves out makes it another operator.
    if len(data) < len(found):
        return None
    out = rule.closes(candidate) or node.result
    activation, bound = _find_fused_activation(candidate, rule, out)
    return QuantizableOp(node, rule, data, out if activation is None else activation.result, activation, bound)


def _find_fused_activation(candidate: Candidate, rule: PlacementRule, out: TensorId) -> tuple[NodeRef | None, Bound]:
    """The activation that only this node feeds, and its bounds."""
    index = candidate.index
    consumers = index.consumers(out)
    # Somebody else would see the value in front of the activation, which the kernel does not write.
    if len(consumers) != 1 or index.is_output(out) or consumers[0].scope != out.scope or consumers[0].index != 0:
        return None, (None, None)
    node = index.node(consumers[0].node)
    if node.op_type not in rule.fuses or node.domain not in ("", "ai.onnx"):
        return None, (None, None)
    bound = _read_clip_bound(Candidate(node, index, candidate.shapes))
    return (node, bound) if bound is not None else (None, (None, None))


def _read_clip_bound(candidate: Candidate) -> Bound | None:
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
    # Scales are made of ranges that hold zero, so such bounds would clip values that the activation lets through.
    if (low is not None and low > 0) or (high is not None and high < 0):
        return None
    return (low, high)
