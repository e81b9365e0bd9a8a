"""Fit a plan to the same network exported again: other node order, other names for what had none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from onnxq.errors import PlanError
from onnxq.graph import Fingerprint, GraphIndex, NodeRef, structural_ids
from onnxq.nearest import did_you_mean
from onnxq.plan import Plan, SitePlan
from onnxq.planner.sums import bind_sums, constant_at, mend_sums
from onnxq.sites import Edge, Role, Site, TensorId


def rebase(plan: Plan, index: GraphIndex, now: Fingerprint, *, new_weights: bool = False) -> Plan:
    """The plan with every site named as in this model.

    A site is found by its names, else by its anchor (the structural id of its tensor) when exactly one
    tensor has it. Names that the plan calls lasting hold also where no tensor has the anchor, because the graph around
    them changed. new_weights: the weights may differ from those the plan was made for; their scales are
    then dropped so that calibration computes them again.

    Integers that would overflow 16-bit sums of the target's kernels are moved, with a warning in the plan.

    Raises PlanError naming the first site that is not there, or when the weights changed unasked.
    """
    anchors = _Anchors(index, structural_ids(index.proto), plan.lasting)
    moved: dict[Site, Site] = {}
    for site in plan.sites:
        found = anchors.site(site)
        if found is None:
            raise PlanError(
                str(site.site), "is in the plan but not in this model", _hint(site.site, index), code="Q404"
            )
        moved[site.site] = found
    edges = _EdgeMap(index, anchors, plan)
    sites = tuple(_moved(site, moved, edges) for site in plan.sites)
    weights = site_weights(sites, index) if plan.lasting else now.weights
    if plan.weights != weights:
        if not new_weights:
            raise PlanError(
                plan.model,
                "the plan's weight scales were computed from other weights than this model's",
                "pass `new_weights=True` to compute them again from these, or quantize anew",
                code="Q402",
            )
        drop = (Role.WEIGHT, Role.BIAS)
        sites = tuple(replace(s, qparams=None, values=None) if s.role in drop else s for s in sites)
        plan = replace(plan, biases=())
    biases = tuple(replace(bias, edge=edges.edge(bias.edge)) for bias in plan.biases)
    floats = tuple(edges.node(name) for name in plan.float_nodes)
    done = replace(plan, sites=sites, biases=biases, float_nodes=floats, topology=now.topology, weights=weights)
    done, lines = mend_sums(bind_sums(done, index), index)
    return replace(done, warnings=(*done.warnings, *(line for line in lines if line not in done.warnings)))


def site_weights(sites: Iterable[SitePlan], index: GraphIndex) -> str:
    """sha256 of the weights at these sites, in their order: the same however the graph around them is written."""
    digest = hashlib.sha256()
    for site in sites:
        if site.role is not Role.WEIGHT:
            continue
        value = constant_at(index, site.site)
        if value is not None:
            digest.update(f"{value.dtype.str}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


class _Anchors:
    """Tensors and nodes by structural id: the id of a node is that of its first output."""

    def __init__(self, index: GraphIndex, ids: Mapping[TensorId, str], lasting: bool) -> None:
        self.index, self.ids, self.lasting = index, ids, lasting
        self.by_id: dict[str, list[TensorId]] = {}
        for tensor, anchor in ids.items():
            self.by_id.setdefault(anchor, []).append(tensor)
        self.nodes = {node.name: node for node in index.nodes}

    def node(self, name: str, anchor: str) -> NodeRef | None:
        """The node of this name if its anchor agrees (or is not known), else the only one with the anchor."""
        own = self.nodes.get(name)
        if own is not None and anchor in ("", self.ids.get(TensorId(own.outputs[0], own.scope), "")):
            return own
        makers = {
            node.name: node
            for tensor in self.by_id.get(anchor, ())
            if (node := self.index.producer(tensor)) is not None and node.outputs[0] == tensor.name
        }
        return next(iter(makers.values())) if len(makers) == 1 else own if self.lasting else None

    def site(self, site: SitePlan) -> Site | None:
        """A site by name where the anchor agrees, else by anchor alone."""
        anchor, _, k = site.anchor.rpartition("/")
        if isinstance(site.site, Edge):
            node = self.node(site.site.node, anchor)
            return None if node is None else Edge(node.name, site.site.index, node.scope)
        there = self.index.resolve(site.site.name, site.site.scope) == site.site
        if site.role in (Role.WEIGHT, Role.BIAS):
            reader = None if not site.consumers else self.node(site.consumers[0].node, anchor)
            if reader is None:
                return None
            return self.index.resolve(reader.inputs[int(k)], reader.scope) if int(k) < len(reader.inputs) else None
        if there and site.anchor in ("", self.ids.get(site.site, "")):
            return site.site
        found = self.by_id.get(site.anchor, [])
        return found[0] if len(found) == 1 else site.site if self.lasting and there else None


class _EdgeMap:
    """Node names of the plan -> node names of this model."""

    def __init__(self, index: GraphIndex, anchors: _Anchors, plan: Plan) -> None:
        self.index, self.anchors, self.by_anchor = index, anchors, plan.nodes

    def node(self, name: str) -> str:
        node = self.anchors.node(name, self.by_anchor.get(name, ""))
        if node is None:
            raise PlanError(
                name,
                "this node is in the plan but not in this model",
                did_you_mean(name, self.anchors.nodes),
                code="Q404",
            )
        return node.name

    def edge(self, edge: Edge) -> Edge:
        name = self.node(edge.node)
        return Edge(name, edge.index, self.index.node(name).scope)


def _moved(site: SitePlan, moved: Mapping[Site, Site], edges: _EdgeMap) -> SitePlan:
    return replace(
        site,
        site=moved[site.site],
        consumers=None if site.consumers is None else tuple(edges.edge(edge) for edge in site.consumers),
        derived=None if site.derived is None else (moved[site.derived[0]], moved[site.derived[1]]),
    )


def _hint(site: Site, index: GraphIndex) -> str:
    if isinstance(site, TensorId):
        names = {name for node in index.nodes for name in (*node.inputs, *node.outputs) if name}
        return did_you_mean(site.name, names)
    return did_you_mean(site.node, {node.name for node in index.nodes})
