"""Tensors and nodes that a plan names, found again in a model."""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, NodeRef, compute_structural_ids
from onnxq.nearest import suggest_names
from onnxq.plan import SitePlan
from onnxq.planner.recognize import Recognized
from onnxq.sites import Edge, Role, Site, TensorId

# Digits that no number of an input has, so that a made-up one costs no time.
_DIGITS = 7


class Anchors:
    """Tensors and nodes of a model, found by the names and structural ids of a plan: a node's is that of its output 0.

    known: node name of the plan -> structural id. lasting: names hold also where no structural id agrees.
    recognized: nodes and tensors by their values, which hold before all names.
    """

    def __init__(
        self,
        index: GraphIndex,
        known: Mapping[str, str],
        *,
        lasting: bool,
        recognized: Recognized | None = None,
    ) -> None:
        self.index, self.known, self.lasting, self.recognized = index, known, lasting, recognized
        self.ids = compute_structural_ids(index)
        self.by_id: dict[str, list[TensorId]] = {}
        for tensor, anchor in self.ids.items():
            self.by_id.setdefault(anchor, []).append(tensor)
        self.nodes = {node.name: node for node in index.nodes}

    def find_node(self, name: str, anchor: str) -> NodeRef | None:
        """The node of this name if its anchor agrees (or is not known), else the only one with the anchor."""
        if self.recognized is not None and name in self.recognized.contents.nodes:
            found = self.recognized.nodes.get(name)
            # Scaling puts other nodes in the place of some, under their names.
            return None if found is None else self.nodes.get(found.name)
        own = self.nodes.get(name)
        if own is not None and anchor in ("", self.ids.get(own.result, "")):
            return own
        makers = {
            node.name: node
            for tensor in self.by_id.get(anchor, ())
            if (node := self.index.producer(tensor)) is not None and node.result == tensor
        }
        # Of two alike nothing says which is meant.
        return next(iter(makers.values())) if len(makers) == 1 else own if self.lasting else None

    def node(self, name: str) -> NodeRef:
        """The node that the plan calls so. Raises PlanError where there is none."""
        node = self.find_node(name, self.known.get(name, ""))
        if node is None:
            raise PlanError(
                name or "a node without a name",
                "this node is in the plan but not in this model",
                self.suggest_nodes(name),
                code="Q404",
            )
        return node

    def suggest_nodes(self, name: str) -> str:
        """The nearest nodes, for a person: by values where the plan has some, else by name."""
        known = None if self.recognized is None else self.recognized.contents.nodes.get(name)
        if known is None or self.recognized is None:
            return suggest_names(name, self.nodes)
        return f"of its output {known.output!r}, {self.recognized.suggest_tensors(known.output)}"

    def edge(self, edge: Edge) -> Edge:
        """The input that the plan calls so. Raises PlanError where its node is not there."""
        node = self.node(edge.node)
        return Edge(node.name, edge.index, node.scope)

    def find_site(self, site: SitePlan) -> Site | None:
        """A site by name where the anchor agrees, else by anchor alone."""
        anchor, _, k = site.anchor.rpartition("/")
        if isinstance(site.site, Edge):
            node = self.find_node(site.site.node, anchor)
            return None if node is None else Edge(node.name, site.site.index, node.scope)
        if site.role in (Role.WEIGHT, Role.BIAS) and site.consumers:
            # Constants are known by who reads them: those of one value have one structural id.
            reader = self.find_node(site.consumers[0].node, anchor)
            position = int(k) if k.isdecimal() and len(k) < _DIGITS else site.consumers[0].index
            return None if reader is None else self.index.input(reader, position)
        return self.find_tensor(site.site, site.anchor)

    def find_tensor(self, tensor: TensorId, anchor: str) -> TensorId | None:
        """The tensor of this name if its anchor agrees (or is not known), else the only one with the anchor."""
        if self.recognized is not None and not tensor.scope and tensor.name in self.recognized.tensors:
            return next(iter(self.recognized.tensors[tensor.name]), None)
        there = self.index.resolve(tensor.name, tensor.scope) == tensor
        if there and anchor in ("", self.ids.get(tensor, "")):
            return tensor
        found = self.by_id.get(anchor, [])
        return found[0] if len(found) == 1 else tensor if self.lasting and there else None
