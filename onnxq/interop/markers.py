"""A model with markers of quantizers, taken apart: the float model, and the plan with the markers' numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto, helper

from onnxq.backends import Target, find_target
from onnxq.calibrate.contents import note_contents
from onnxq.config import DEFAULT_TARGET
from onnxq.errors import ModelError
from onnxq.graph import Editor, GraphIndex, fold_constants, inline_functions, name_nodes, read_types
from onnxq.graph.identity import compute_fingerprint, compute_structural_ids
from onnxq.graph.load import ModelSource, load_model
from onnxq.graph.scopes import drop_named
from onnxq.graph.shapes import infer_shapes
from onnxq.interop.marker_flow import Flow, MarkerGroup, Perm, check_quantizers, find_flow
from onnxq.interop.marker_nodes import DOMAIN, Marker, read_markers
from onnxq.plan import Plan, PrecisionPlan, SitePlan, SitePlans
from onnxq.plan.model import Saturation
from onnxq.planner import add_precision, anchor_sites, find_float_nodes, find_needed_opset
from onnxq.planner.sums import bind_sums, digest_weights, warn_allowed
from onnxq.sites import Names, Role, Site, TensorId
from onnxq.spec import FLOAT_TYPES, FloatType, QParams, QuantSpec
from onnxq.wording import show_as_summary

# Of the sites, in the plan.
RULE = "marker"
# Widths that a 4-bit type holds.
_NATIVE_BITS = 4


@show_as_summary
@dataclass(frozen=True, eq=False)
class Marked:
    """The float network without markers, and a calibrated plan for it."""

    model: ModelProto
    plan: Plan
    # Name of each quantizer -> its sites in the plan.
    sites: Mapping[str, tuple[Site, ...]]


def strip_markers(
    model: ModelSource,
    *,
    target: str = DEFAULT_TARGET,
    mode: str = "static",
    quantizers: Iterable[str] | None = None,
    name: str = "",
    saturation: Saturation = "avoid",
) -> Marked:
    """Take the `ai.onnxq::FakeQuantize` markers out of a model, and make a plan with their numbers.

    target: the backend that the plan is for. mode: the configuration's.
    quantizers: the sites that must be marked, no more and no fewer; None: any. name: the model's, for the plan.
    saturation: "allow" keeps weights that overflow 16-bit sums in the target's kernels.
    Quantized tensors get the names of their sites, weights are stored in their readers' order of axes, and weights of 4
    bits or fewer in a 4-bit type where the target accepts one. `onnxq.apply` carries the plan out.
    Raises ModelError naming a site that is lost in the graph or unknown, or whose numbers are not constant or wrong.
    """
    engine = find_target(target, mode)
    # Before markers are removed: they keep weights from being folded, and so in the shape that is quantized.
    proto = fold_constants(inline_functions(name_nodes(load_model(model).proto)))
    index = GraphIndex(infer_shapes(proto))
    markers = tuple(read_markers(index))
    if not markers:
        fix = "export it with its quantizers calibrated"
        raise ModelError(name or "the model", f"has no {DOMAIN} markers", fix, code="Q118")
    check_quantizers(markers, index, None if quantizers is None else tuple(quantizers))
    flow = find_flow(markers, index)
    stripped, sites = _Stripper(Editor(proto), index, markers, flow, engine).strip_markers()
    # Without markers more can be folded; a fold that takes a site away is not taken.
    folded = fold_constants(stripped)
    is_foldable = _keeps_sites(sites, folded)
    if not is_foldable and not _keeps_sites(sites, stripped):
        raise ModelError(
            name or "the model",
            "what one of its markers quantizes reaches no output",
            "export it again",
            code="Q120",
        )
    final = folded if is_foldable else stripped
    plan = _make_plan(final, sites, engine, name, ("constants",) if is_foldable else (), saturation)
    quantized: dict[str, tuple[Site, ...]] = {}
    for group, site in zip(flow.groups, plan.sites, strict=True):
        for quantizer in group.sites:
            quantized[quantizer] = (*quantized.get(quantizer, ()), site.site)
    # Activations of one quantizer are one group, since they share its numbers.
    groups = {
        site: quantizer
        for quantizer, shared in quantized.items()
        if len(shared) > 1
        for site in shared
    }
    plan = plan.with_sites(
        site if site.role.is_weight else replace(site, group=groups.get(site.site, site.group))
        for site in plan.sites
    )
    return Marked(final, plan, quantized)


@dataclass(eq=False)
class _Stripper:
    """Takes the markers out of one model."""

    editor: Editor[ModelProto]
    index: GraphIndex
    markers: tuple[Marker, ...]
    flow: Flow
    engine: Target
    # Base of a group -> the tensor under its lasting name.
    names: dict[TensorId, TensorId] = field(default_factory=dict)
    # (base, order of axes) -> the tensor that holds the weight in that order.
    turned: dict[tuple[TensorId, Perm], TensorId] = field(default_factory=dict)
    # Marker -> the Identity in its place.
    stand_ins: dict[str, str] = field(default_factory=dict)

    def strip_markers(self) -> tuple[ModelProto, SitePlans]:
        """The float model, and the site of every group in it."""
        for marker in self.markers:
            if marker.node.name not in self.flow.carriers:
                self._bypass_marker(marker)
        for marker in self.markers:
            if marker.node.name in self.flow.carriers:
                self._insert_identity(marker)
        for group in self.flow.groups:
            self._name_base(group)
        taken: set[Site] = set()
        sites = tuple(self._place_group(group, taken) for group in self.flow.groups)
        out = self.editor.finish()
        drop_named(out.opset_import, [DOMAIN], by="domain")
        return out, sites

    def _bypass_marker(self, marker: Marker) -> None:
        base = self.flow.bases[marker.result]
        given_out = self.index.is_output(marker.result)
        readers = self.editor.list_consumers(marker.result)
        self.editor.rewire(marker.result, base.name, consumers=readers, outputs=not given_out)
        self.editor.remove_node(marker.node.name)

    def _insert_identity(self, marker: Marker) -> None:
        source = self.flow.bases.get(marker.source, marker.source)
        self.editor.remove_node(marker.node.name)
        name = self.editor.fresh(f"{marker.result.name}/Identity")
        self.stand_ins[marker.node.name] = name
        self.editor.insert_node(
            marker.node.scope, "Identity", [source.name], [marker.result.name], name=name
        )

    def _name_base(self, group: MarkerGroup) -> None:
        """Give the base its lasting name; store a transposed weight as its readers read it."""
        base = group.base
        if group.outputs:
            self._rename_base(base, group.outputs[0].result.name)
        elif group.perm:
            self._store_transposed(group)
        elif (
            self.index.find_producer(base) is not None
            and not self.index.is_output(base)
            and base not in self.names
        ):
            self._rename_base(
                base,
                self.editor.fresh(group.sites[0]) if base.name != group.sites[0] else base.name,
            )

    def _rename_base(self, base: TensorId, name: str) -> None:
        if name != base.name:
            self.editor.rename_tensor(base, name)
        self.names[base] = TensorId(name, base.scope)

    def _store_transposed(self, group: MarkerGroup) -> None:
        perm = group.perm
        base = group.base
        value = self.index.find_constant(base)
        # Only groups on constants have an order of axes.
        assert value is not None
        key = (base, perm)
        if list(perm) == sorted(perm):
            self.turned[key] = base
        if key not in self.turned:
            wanted = {other.perm for other in self.flow.groups if other.base == base}
            turned = np.ascontiguousarray(value.transpose(perm))
            markers = {marker.node.name for marker in self.markers}
            alone = all(edge.node in markers for edge in self.index.list_consumers(base))
            # Nobody reads the weight in its old order: it is replaced rather than stored twice.
            if wanted == {perm} and alone:
                self.editor.replace_initializer(base, turned)
                self.turned[key] = base
            else:
                name = self.editor.add_constant(base.scope, group.sites[0], turned)
                self.turned[key] = TensorId(name, base.scope)
        for edge in group.edges:
            self.editor.replace_input(edge, self.turned[key].name)

    def _place_group(self, group: MarkerGroup, taken: set[Site]) -> SitePlan:
        tensor = self.turned.get((group.base, group.perm), self.names.get(group.base, group.base))
        edges = sorted(
            dict.fromkeys(group.edges),
            key=lambda edge: (self.index.find_node(edge.node).order, edge.index),
        )
        readers = tuple(
            replace(edge, node=self.stand_ins.get(edge.node, edge.node)) for edge in edges
        )
        # Several groups on one tensor: the later ones are called by their first reader.
        site = readers[0] if tensor in taken else tensor
        taken.add(site)
        role = self._find_role(group, tensor)
        spec = group.spec
        qparams = group.first.qparams
        # Scales of blocks have an axis for each of the tensor's; those of channels have one.
        if group.perm and spec.has_blocks and qparams is not None:
            scale = qparams.scale.transpose(group.perm)
            qparams = QParams(scale, qparams.zero_point.transpose(group.perm), qparams.origin)
        if role.is_weight and readers and not group.whole:
            op_type = self.index.find_node(readers[0].node).op_type
            spec = _choose_storage(spec, self.engine, op_type)
        return SitePlan(
            site=site,
            role=role,
            spec=spec,
            qparams=qparams,
            rule=RULE,
            reason=f"quantizer {', '.join(group.sites)}",
            consumers=None if group.whole else readers,
            tensor=tensor,
        )

    def _find_role(self, group: MarkerGroup, tensor: TensorId) -> Role:
        stays = group.base in self.flow.bases
        if group.first.role.is_weight and self.index.is_constant(group.base) and not stays:
            return Role.WEIGHT
        given_out = group.outputs or (stays and self.index.is_output(group.base))
        whole_output = given_out and not tensor.scope and group.whole
        return Role.OUTPUT if whole_output else Role.ACTIVATION


def _choose_storage(spec: QuantSpec, engine: Target, op_type: str) -> QuantSpec:
    """The spec in a 4-bit type, where it fits one that the target accepts; else the spec itself."""
    if spec.bits > _NATIVE_BITS or spec.storage_bits != 8:
        return spec
    packed = replace(spec, storage="int4" if spec.signed else "uint4")
    return packed if engine.capability(packed, Role.WEIGHT, op_type) is not None else spec


def _keeps_sites(sites: Iterable[SitePlan], proto: ModelProto) -> bool:
    """True when the model still has every site and every reader of it."""
    index = GraphIndex(proto)
    for site in sites:
        tensor = site.site
        edges = site.find_readers(index)
        read = {index.find_input(index.named.get(edge.node), edge.index) for edge in edges}
        if None in read:
            return False
        if isinstance(tensor, TensorId):
            there = index.resolve_tensor(tensor.name, tensor.scope)
            if (read | {there}) != {tensor}:
                return False
    return True


def _make_plan(
    proto: ModelProto,
    sites: SitePlans,
    engine: Target,
    name: str,
    prepare: Names,
    saturation: Saturation,
) -> Plan:
    typed = infer_shapes(proto)
    index = GraphIndex(typed)
    floats = find_float_nodes(index, sites, engine)
    anchors, nodes = anchor_sites(index, sites, floats, compute_structural_ids(typed))
    plan = Plan(
        target=engine.name,
        model=name,
        saturation=saturation,
        warnings=warn_allowed(engine.name, saturation),
        topology=compute_fingerprint(typed).topology,
        weights=digest_weights(anchors, index),
        lasting=True,
        opset=find_needed_opset(anchors),
        prepare=prepare,
        sites=anchors,
        float_nodes=floats,
        nodes=nodes,
        data="the model's own quantizers",
    )
    narrow = read_types(proto).computes
    plan = bind_sums(_narrow_plan(plan, FLOAT_TYPES[narrow]) if narrow else plan, index)
    return note_contents(plan, typed)


def _narrow_plan(plan: Plan, kind: FloatType) -> Plan:
    """The plan of a network that was trained in a narrow type: its levels are those of scales of that type."""
    dtype = helper.tensor_dtype_to_np_dtype(kind.onnx_type)
    sites = []
    for site in plan.sites:
        if site.qparams is not None:
            narrow = site.qparams.scale.astype(dtype).astype(np.float32)
            site = replace(site, qparams=replace(site.qparams, scale=narrow))
        sites.append(site)
    return add_precision(plan.with_sites(sites), PrecisionPlan(type=kind), None)
