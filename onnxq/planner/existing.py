"""Pairs that a model came with: planned around, shared where they fit, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxq.graph import Graph, ModelLike, NodeRef
from onnxq.plan import SitePlan
from onnxq.sites import Edge, TensorId

# ORT moves pairs through these.
_MOVES = frozenset({"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "MaxPool", "Relu", "Clip"})
# Nodes of that kind in a row: exporters write two or three, and a longer search finds pairs of other operators.
_REACH = 6


@dataclass(frozen=True, eq=False)
class Existing:
    """The pairs of a prepared model, and the same model without them, which placement looks at.

    view: the model with every pair here taken out, so that readers read the tensor before it (a stored integer weight
        in the place of its float one). Nodes, inputs and all other tensors are called as in the model. None: no pairs.
    by_tensor: the pair of each computed tensor, by the tensor's name in the view.
    by_edge: the pair behind each input that reads a dequantized tensor, directly or through a guard.
    constants: weights and biases that are integers already.
    direct: inputs that read a dequantized tensor with nothing between.
    stand_ins: nodes of pairs that the view has too, as something that is no pair.
    weighted: nodes that read an integer constant through its DequantizeLinear, also behind nodes that only move it.
    """

    view: ModelLike | None = None
    by_tensor: Mapping[TensorId, SitePlan] = field(default_factory=dict)
    by_edge: Mapping[Edge, SitePlan] = field(default_factory=dict)
    constants: tuple[SitePlan, ...] = ()
    direct: frozenset[Edge] = frozenset()
    stand_ins: frozenset[str] = frozenset()
    weighted: frozenset[str] = frozenset()

    def pair_for(self, edge: Edge | None, tensor: TensorId) -> SitePlan | None:
        """The pair that this input of a node reads or can share; edge None: the pair behind the tensor's maker."""
        if edge is None:
            return self.by_tensor.get(tensor)
        found = self.by_edge.get(edge) or self.by_tensor.get(tensor)
        # A pair serves the readers in its own graph: no kernel forms across the border of a body.
        return found if found is not None and found.site.scope == edge.scope else None

    @property
    def sites(self) -> tuple[SitePlan, ...]:
        """Every pair once: those of computed tensors, then constants."""
        pairs = (*self.by_tensor.values(), *self.by_edge.values())
        return (*{site.site: site for site in pairs}.values(), *self.constants)


NOTHING = Existing()


def is_between_pairs(index: Graph, existing: Existing, name: str) -> bool:
    """True when the engine quantizes this node as the model came: by its pairs, or on its own between them.

    index: of `existing.view`.
    """
    if name in existing.weighted:
        return True
    if not existing.by_tensor:
        return False
    node = index.node(name)
    tensors = [(Edge(name, k, node.scope), index.resolve(read, node.scope)) for k, read in enumerate(node.inputs)]
    edges = [edge for edge, tensor in tensors if tensor is not None and not index.is_constant(tensor)]
    reads = bool(edges) and all(_reads_pair(index, existing, edge) for edge in edges)
    return reads and _has_pair_behind(index, existing, node)


def _reads_pair(index: Graph, existing: Existing, edge: Edge) -> bool:
    """True when an input reads a pair of the model's own, directly or through nodes that move its values."""
    for _ in range(_REACH):
        if edge in existing.direct:
            return True
        node = index.node(edge.node)
        tensor = index.resolve(node.inputs[edge.index], node.scope)
        maker = None if tensor is None or edge in existing.by_edge else index.producer(tensor)
        if maker is None or maker.op_type not in _MOVES:
            return False
        edge = Edge(maker.name, 0, maker.scope)
    return False


def _has_pair_behind(index: Graph, existing: Existing, node: NodeRef) -> bool:
    """True when a pair of the model's own stands behind the node, or behind nodes that move or clip its values."""
    for _ in range(_REACH):
        if node.result in existing.by_tensor:
            return True
        behind = [index.node(edge.node) for edge in index.consumers(node.result)]
        # With several readers ORT would have to find a pair on every way.
        if len(behind) != 1 or behind[0].op_type not in _MOVES:
            return False
        node = behind[0]
    return False
