"""A model with quantizers marked in it, taken apart: the float model, and the plan that says what the markers said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from onnxq.errors import ModelError
from onnxq.graph import (
    Editor,
    GraphIndex,
    fingerprint,
    fold_constants,
    infer_shapes,
    inline_functions,
    load_model,
    name_nodes,
    structural_ids,
)
from onnxq.interop.marker_flow import Flow, Group, check_quantizers, flow
from onnxq.interop.marker_nodes import DOMAIN, Marker, read_markers
from onnxq.plan import Plan, SitePlan
from onnxq.plan.model import Saturation
from onnxq.planner import anchored, float_nodes, needed_opset, site_weights
from onnxq.planner.sums import ALLOWED, bind_sums
from onnxq.sites import Edge, Role, Site, TensorId
from onnxq.spec import PerBlock, QParams, QuantSpec
from onnxq.targets import Target
from onnxq.targets import target as engine_of

RULE = "marker"
_NATIVE_BITS = 4


@dataclass(frozen=True, eq=False)
class Marked:
    """model: the float network, without markers. plan: a calibrated plan for it. sites: where each quantizer went."""

    model: onnx.ModelProto
    plan: Plan
    sites: Mapping[str, tuple[Site, ...]]


def strip_markers(
    model: str | Path | onnx.ModelProto,
    *,
    target: str = "ort",
    quantizers: Iterable[str] | None = None,
    name: str = "",
    saturation: Saturation = "avoid",
) -> Marked:
    """Take the `ai.onnxq::FakeQuantize` markers out of a model, and make a plan of what they say.

    target: "ort", "trt" or "virtual": the engine the plan is for. quantizers: the sites that must be marked, no more
    and no fewer; None: whatever is. name: the model's, for the plan. saturation: "allow" leaves weights as they are
    that overflow 16-bit sums in the target's kernels.
    Tensors that were quantized get their site's name, weights are stored in the order of axes their readers want, and
    weights of 4 bits or fewer in a 4-bit type where the target takes one. `onnxq.apply` carries the plan out.
    Raises ModelError naming the site: lost in the graph, unknown, without constant numbers, or with wrong ones.
    """
    engine = engine_of(target)
    loaded = load_model(model).proto
    # Markers are in the way of folding weights, which so keep the shape in which they are quantized.
    proto = fold_constants(inline_functions(name_nodes(loaded)))
    index = GraphIndex(infer_shapes(proto))
    markers = tuple(read_markers(index))
    if not markers:
        raise ModelError(
            name or "the model", f"has no {DOMAIN} markers", "export it with its quantizers calibrated", code="Q118"
        )
    check_quantizers(markers, index, None if quantizers is None else tuple(quantizers))
    found = flow(markers, index)
    stripped, placed = _Stripper(proto, index, markers, found).run()
    sites = tuple(_site(one, engine, index) for one in placed)
    folded = fold_constants(stripped)
    kept = _intact(sites, folded)
    final = folded if kept else stripped
    if not kept and not _intact(sites, stripped):  # pragma: no cover - a defect of this module
        raise ModelError(name or "the model", "a site was lost while its marker was taken out", "report this model")
    plan = _plan(final, sites, target, name, ("constants",) if kept else (), saturation)
    where: dict[str, list[Site]] = {}
    for one, site in zip(placed, plan.sites, strict=True):
        for quantizer in one.group.sites:
            where.setdefault(quantizer, []).append(site.site)
    return Marked(final, _grouped(plan, where), {key: tuple(value) for key, value in where.items()})


@dataclass(frozen=True, eq=False)
class _Placed:
    """A group with its tensor and site in the stripped model. output: the site is an output of the model."""

    group: Group
    tensor: TensorId
    site: Site
    consumers: tuple[Edge, ...] | None
    constant: bool
    output: bool


class _Stripper:
    """Takes the markers out of one model."""

    def __init__(self, proto: onnx.ModelProto, index: GraphIndex, markers: tuple[Marker, ...], found: Flow) -> None:
        self.editor, self.index, self.markers, self.flow = Editor(proto), index, markers, found
        self.names: dict[TensorId, TensorId] = {}
        self.turned: dict[tuple[TensorId, tuple[int, ...]], TensorId] = {}
        self.stand_ins: dict[str, str] = {}

    def run(self) -> tuple[onnx.ModelProto, list[_Placed]]:
        """The float model, and where every group is in it."""
        for marker in self.markers:
            if marker.node.name not in self.flow.carriers:
                self._bypass(marker)
        for marker in self.markers:
            if marker.node.name in self.flow.carriers:
                self._identity(marker)
        for group in self.flow.groups:
            self._settle(group)
        taken: set[Site] = set()
        placed = [self._placed(group, taken) for group in self.flow.groups]
        self.editor.remove_unused()
        out = self.editor.export()
        kept = [entry for entry in out.opset_import if entry.domain != DOMAIN]
        del out.opset_import[:]
        out.opset_import.extend(kept)
        return out, placed

    def _bypass(self, marker: Marker) -> None:
        base = self.flow.bases[marker.result]
        given_out = self.index.is_output(marker.result)
        readers = self.editor.consumers(marker.result)
        self.editor.rewire(marker.result, base.name, consumers=readers, outputs=not given_out)
        self.editor.remove_node(marker.node.name)

    def _identity(self, marker: Marker) -> None:
        source = self.flow.bases.get(marker.source, marker.source)
        self.editor.remove_node(marker.node.name)
        made = self.stand_ins[marker.node.name] = self.editor.fresh(f"{marker.result.name}/Identity")
        self.editor.insert_node(marker.node.scope, "Identity", [source.name], [marker.result.name], name=made)

    def _settle(self, group: Group) -> None:
        """Give the base its lasting name; store a turned weight as it is read."""
        base = group.base
        if group.outputs:
            self._rename(base, group.outputs[0].result.name)
        elif group.perm:
            self._turn(group)
        elif self.index.producer(base) is not None and not self.index.is_output(base) and base not in self.names:
            self._rename(base, self.editor.fresh(group.sites[0]) if base.name != group.sites[0] else base.name)

    def _rename(self, base: TensorId, name: str) -> None:
        if name != base.name:
            self.editor.rename_tensor(base, name)
        self.names[base] = TensorId(name, base.scope)

    def _turn(self, group: Group) -> None:
        value = self.index.constant(group.base)
        assert value is not None
        key = (group.base, group.perm)
        if list(group.perm) == sorted(group.perm):
            self.turned[key] = group.base
        if key not in self.turned:
            wanted = {other.perm for other in self.flow.groups if other.base == group.base}
            turned = np.ascontiguousarray(value.transpose(group.perm))
            markers = {marker.node.name for marker in self.markers}
            alone = all(edge.node in markers for edge in self.index.consumers(group.base))
            if wanted == {group.perm} and alone:
                self.editor.replace_initializer(group.base, turned)
                self.turned[key] = group.base
            else:
                name = self.editor.fresh(group.sites[0])
                self.editor.add_initializer(group.base.scope, name, turned)
                self.turned[key] = TensorId(name, group.base.scope)
        for edge in group.edges:
            self.editor.replace_input(edge, self.turned[key].name)

    def _placed(self, group: Group, taken: set[Site]) -> _Placed:
        tensor = self.turned.get((group.base, group.perm), self.names.get(group.base, group.base))
        order = {node.name: k for k, node in enumerate(self.index.nodes)}
        edges = tuple(sorted(dict.fromkeys(group.edges), key=lambda edge: (order[edge.node], edge.index)))
        renamed = tuple(replace(edge, node=self.stand_ins.get(edge.node, edge.node)) for edge in edges)
        constant = self.index.is_constant(group.base) and group.base not in self.flow.bases
        stays = group.base in self.flow.bases
        output = not tensor.scope and (bool(group.outputs) or (stays and self.index.is_output(group.base)))
        site: Site = tensor
        if site in taken:
            site = renamed[0]
        taken.add(site)
        return _Placed(group, tensor, site, None if group.whole else renamed, constant, output)


def _site(placed: _Placed, engine: Target, index: GraphIndex) -> SitePlan:
    group = placed.group
    role = Role.OUTPUT if placed.output and placed.consumers is None else Role.ACTIVATION
    if group.first.role is Role.WEIGHT and placed.constant:
        role = Role.WEIGHT
    spec, numbers = group.spec, group.first.qparams
    if group.perm and isinstance(spec.granularity, PerBlock):
        numbers = QParams(numbers.scale.transpose(group.perm), numbers.zero_point.transpose(group.perm), numbers.origin)
    if role is Role.WEIGHT and placed.consumers:
        spec = _native(spec, engine, index.node(placed.consumers[0].node).op_type)
    return SitePlan(
        site=placed.site,
        role=role,
        spec=spec,
        qparams=numbers,
        rule=RULE,
        reason=f"quantizer {', '.join(group.sites)}",
        consumers=placed.consumers,
        tensor=placed.tensor,
    )


def _native(spec: QuantSpec, engine: Target, op_type: str) -> QuantSpec:
    """The spec in a 4-bit type, where it fits one and the target takes it."""
    if spec.bits > _NATIVE_BITS or spec.storage_bits != 8:
        return spec
    packed = replace(spec, storage="int4" if spec.signed else "uint4")
    return packed if engine.capability(packed, Role.WEIGHT, op_type) is not None else spec


def _intact(sites: Iterable[SitePlan], proto: onnx.ModelProto) -> bool:
    """True when every site and every reader of it is still there."""
    index = GraphIndex(proto)
    nodes = {node.name: node for node in index.nodes}
    for site in sites:
        edges = [*(site.consumers or ()), *([site.site] if isinstance(site.site, Edge) else [])]
        if any(edge.node not in nodes or edge.index >= len(nodes[edge.node].inputs) for edge in edges):
            return False
        if isinstance(site.site, TensorId):
            read = {index.resolve(nodes[edge.node].inputs[edge.index], edge.scope) for edge in edges}
            if index.resolve(site.site.name, site.site.scope) != site.site or read - {site.site}:
                return False
    return True


def _plan(
    proto: onnx.ModelProto,
    sites: tuple[SitePlan, ...],
    target: str,
    name: str,
    prepare: tuple[str, ...],
    saturation: Saturation,
) -> Plan:
    typed = infer_shapes(proto)
    index = GraphIndex(typed)
    engine = engine_of(target)
    floats = float_nodes(index, sites) if engine.quantizes_alone else ()
    anchors, nodes = anchored(index, sites, floats, structural_ids(typed))
    plan = Plan(
        target=target,
        model=name,
        saturation=saturation,
        warnings=(ALLOWED,) if saturation == "allow" and engine.saturates else (),
        topology=fingerprint(typed).topology,
        weights=site_weights(anchors, index),
        lasting=True,
        opset=needed_opset(anchors, index),
        prepare=prepare,
        sites=anchors,
        float_nodes=floats,
        nodes=nodes,
        data="the model's own quantizers",
    )
    return bind_sums(plan, index)


def _grouped(plan: Plan, where: Mapping[str, list[Site]]) -> Plan:
    """Activation sites of one quantizer share its numbers, and say so."""
    shared = {site: quantizer for quantizer, sites in where.items() if len(sites) > 1 for site in sites}
    sites = tuple(
        replace(one, group=shared[one.site]) if one.site in shared and one.role is not Role.WEIGHT else one
        for one in plan.sites
    )
    return plan.with_sites(sites)
