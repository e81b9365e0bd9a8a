"""The pairs that a model came with, for planning: their numbers, their readers, and the model without them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxq.annotate.bits import Notes, Numbers, read_notes, read_numbers
from onnxq.annotate.find import Chain, find_chains, is_dequantize, is_quantize
from onnxq.annotate.read import describe_pair, drop_clip
from onnxq.arrays import are_finite, unwrap_single
from onnxq.emit import PLAN_KEY, unpack_plan
from onnxq.errors import OnnxqError
from onnxq.graph import LAYOUT_OPS, Editor, GraphIndex, ModelLike, NodeRef, get_index
from onnxq.graph.scopes import map_entries, walk_from
from onnxq.plan import Plan, SitePlan
from onnxq.planner import KEPT, NOTHING, Existing
from onnxq.sites import Edge, Edges, Site, TensorId
from onnxq.spec import QParams, QuantSpec

_REASON = "the model came with this pair"
# Nodes that may stand between a weight's DequantizeLinear and the node that multiplies by it.
_MOVES = LAYOUT_OPS | {"Cast"}


def find_existing(proto: ModelLike) -> Existing:
    """The pairs of a prepared model whose scales are constants, and the model without them (the view).

    Half a pair, at an operator that computes on integers itself, counts as one. Pairs that no other reader could share
    stay in the view and out of the result: those with scales computed at run time or per channel of an activation, and
    those whose QuantizeLinear and DequantizeLinear differ.
    """
    index = get_index(proto)
    if not any(is_dequantize(node) or is_quantize(node) for node in index.nodes):
        return NOTHING
    notes = read_notes(proto)
    # The sites of the plan that the model was written from.
    finder = _PairFinder(index, notes, {site.site: site for site in notes.sites})
    for chain in find_chains(index):
        finder.add_chain(chain)
    return finder.make_existing()


def read_plan_note(proto: ModelLike) -> Plan | None:
    """The plan in the model's metadata; None without one, and for one that cannot be read."""
    text = map_entries(proto.metadata_props).get(PLAN_KEY)
    try:
        return None if text is None else unpack_plan(text)
    except OnnxqError:
        return None


@dataclass(eq=False)
class _PairFinder:
    """Collects pairs chain by chain."""

    index: GraphIndex
    notes: Notes
    planned: Mapping[Site, SitePlan]
    sites: dict[Site, SitePlan] = field(default_factory=dict)
    # Float tensor, and input, -> the site of the pair that it has.
    by_tensor: dict[TensorId, Site] = field(default_factory=dict)
    by_edge: dict[Edge, Site] = field(default_factory=dict)
    constants: list[SitePlan] = field(default_factory=list)
    # Inputs that read a dequantized tensor, and nodes that multiply by a dequantized constant.
    direct: set[Edge] = field(default_factory=set)
    weighted: set[str] = field(default_factory=set)
    # Dequantized tensor -> the tensor that its readers read in the view.
    taken_out: dict[TensorId, TensorId] = field(default_factory=dict)
    # Nodes of half pairs, which stay in the view as Identity.
    halves: list[NodeRef] = field(default_factory=list)

    def add_chain(self, chain: Chain) -> None:
        """Add one chain to the result, if it is a pair that can be taken out of the view."""
        # Rows of a table are looked up as the model came: nobody shares them, and no reader can do without the Gather.
        if chain.lookup is not None:
            return
        index = self.index
        result = chain.last.result
        qparams = read_numbers(index, chain)
        chain = drop_clip(index, chain, qparams)
        if chain.source is None or qparams.scale is None:
            return
        edges = index.list_consumers(result)
        constant = index.is_constant(chain.source)
        if chain.dequantize is None or (chain.quantize is None and not constant):
            self._add_half(chain, qparams, edges)
            return
        if constant:
            # What reads it, also through nodes that only move it.
            multiplying = walk_from(
                (index.find_node(edge.node) for edge in edges),
                lambda node: index.readers(node.result) if node.op_type in _MOVES else [],
            )
            self.weighted.update(node.name for node in multiplying)
            # Its readers cannot read the integers as they are stored.
            if chain.inner_op == "Transpose":
                return
            site = self._make_site(chain, qparams, edges)
            if site is not None:
                self.constants.append(site)
        elif not self._share_pair(chain, qparams, edges):
            return
        self.taken_out[result] = chain.source
        self.direct.update(edges)

    def _add_half(self, chain: Chain, qparams: Numbers, edges: Edges) -> None:
        """Add a node that stands alone between float and an operator on integers.

        Other readers of a QuantizeLinear get a DequantizeLinear when the pairs are written.
        """
        begins = chain.quantize is None
        tensor = chain.last.result if begins else chain.source
        site = self._make_site(chain, qparams, edges if begins else ())
        if tensor is None or site is None or tensor in self.by_tensor:
            return
        if not site.spec.has_one_scale or site.spec.storage not in ("int8", "uint8"):
            return
        self.sites[tensor] = replace(site, site=tensor)
        self.by_tensor[tensor] = tensor
        self.halves.append(chain.last)
        if begins:
            self.by_edge.update(dict.fromkeys(edges, tensor))
            self.direct.update(edges)

    def _share_pair(self, chain: Chain, qparams: Numbers, edges: Edges) -> bool:
        """Add the pair of a computed tensor. False for one that stays in the view."""
        quantizer = chain.quantize
        source = chain.source
        result = chain.last.result
        if (
            quantizer is None
            or source is None
            or not self._have_same_numbers(quantizer, chain.last)
        ):
            return False
        site = self._make_site(chain, qparams, edges)
        if site is None or not site.spec.has_one_scale:
            return False
        known = self.sites.get(self.by_tensor.get(source, result))
        if (
            known is not None
            and known.site.scope == result.scope
            and (known.spec, known.qparams) == (site.spec, site.qparams)
        ):
            # A second DequantizeLinear, or a second pair with the same numbers: one site.
            site = replace(known, consumers=known.named_consumers + edges)
        self.sites[site.site] = site
        if result.scope == source.scope:
            self.by_tensor.setdefault(source, site.site)
        for edge in edges:
            self.by_edge[edge] = site.site
            guard = self.index.find_node(edge.node)
            # A guard hands the same values on, so its readers read this pair too.
            if is_guard(guard):
                self.taken_out[guard.result] = source
                self.by_edge.update(
                    dict.fromkeys(self.index.list_consumers(guard.result), site.site)
                )
        return True

    def _make_site(self, chain: Chain, chain_qparams: Numbers, edges: Edges) -> SitePlan | None:
        """The pair as a site with its numbers; None where no QuantSpec describes it."""
        info = describe_pair(self.index, chain, self.notes)
        known = self.planned.get(info.site)
        try:
            spec = QuantSpec(
                bits=info.bits,
                signed=chain_qparams.element_type.signed,
                symmetric=info.symmetric,
                # The file does not tell it apart; only onnxq's own plan does.
                narrow_range=known is not None and known.spec.narrow_range,
                granularity=chain_qparams.granularity,
                storage=chain_qparams.storage,
                footroom=chain.inner_op == "Max",
            )
        except OnnxqError:
            return None
        qparams = chain_qparams.qparams
        assert qparams is not None
        scale, zero = unwrap_single(spec.has_one_scale, qparams.scale, qparams.zero_point)
        # No plan can record a scale that is not finite, and nothing is worth sharing it.
        if (
            scale.shape != zero.shape
            or (spec.has_one_scale and scale.ndim)
            or not are_finite(scale)
        ):
            return None
        base = known or SitePlan(site=info.site, role=info.role, spec=spec, reason=_REASON)
        return replace(
            base,
            site=chain.last.result if self._is_taken(info.site, chain) else info.site,
            role=info.role,
            spec=spec,
            qparams=QParams(scale, zero, "the model's own"),
            rule=base.rule or KEPT,
            consumers=edges,
            group="",
            # The integers are in the file and do not change, so nothing has to be kept for them.
            values=None,
            sum_orders=(),
            dequantize=chain.last.name,
        )

    def _is_taken(self, site: Site, chain: Chain) -> bool:
        """True when another pair has this name, or the float constant that a stored weight was once made from."""
        if site in self.sites:
            return True
        if not isinstance(site, TensorId) or chain.quantize is not None:
            return False
        return self.index.resolve_tensor(site.name, site.scope) not in (
            None,
            chain.last.result,
            chain.source,
        )

    def _have_same_numbers(self, quantizer: NodeRef, dequantizer: NodeRef) -> bool:
        """True where both halves have one scale and one zero point, by name or by value."""
        for k in (1, 2):
            mine, theirs = (self.index.input_value(node, k) for node in (quantizer, dequantizer))
            equal = mine is not None and theirs is not None and np.array_equal(mine, theirs)
            # Numbers that are computed have no value, and are the same where both read one tensor.
            if not equal and self.index.find_input(quantizer, k) != self.index.find_input(
                dequantizer, k
            ):
                return False
        return True

    def make_existing(self) -> Existing:
        """The pairs found, with the view."""
        # A model output must keep its name, so the node that makes it stays, as Identity.
        outputs = (
            result for result in self.taken_out if not result.scope and self.index.is_output(result)
        )
        stand_ins = [*self.halves, *filter(None, map(self.index.find_producer, outputs))]
        return Existing(
            view=_build_view(self.index, self.taken_out, stand_ins),
            stand_ins=frozenset(node.name for node in stand_ins),
            by_tensor={tensor: self.sites[site] for tensor, site in self.by_tensor.items()},
            by_edge={edge: self.sites[site] for edge, site in self.by_edge.items()},
            constants=tuple(self.constants),
            direct=frozenset(self.direct),
            weighted=frozenset(self.weighted),
        )


def is_guard(node: NodeRef) -> bool:
    """True for a Clip without bounds, which changes no value and keeps engines from fusing its reader."""
    bounded = any(node.inputs[1:]) or "min" in node.attrs or "max" in node.attrs
    return node.is_onnx("Clip") and not bounded


def _build_view(
    index: GraphIndex, taken_out: Mapping[TensorId, TensorId], stand_ins: Iterable[NodeRef]
) -> ModelLike:
    """The model in which readers of dequantized tensors read the float ones; for planning only, it is never run.

    taken_out: dequantized tensor -> tensor that its readers get. stand_ins: nodes that become Identity; those that make
    outputs of the model are among them.
    """
    editor = Editor(index.model)
    for dequantized, source in taken_out.items():
        editor.rewire(
            dequantized,
            _trace_source(taken_out, source).name,
            consumers=editor.list_consumers(dequantized),
            outputs=bool(dequantized.scope),
        )
    for node in stand_ins:
        traced = _trace_source(taken_out, node.result)
        editor.set_op(node.name, "Identity")
        first, *others = node.list_edges()
        editor.replace_input(first, traced.name if traced != node.result else node.inputs[0])
        for edge in others:
            editor.replace_input(edge, "")
    return editor.finish()


def _trace_source(taken_out: Mapping[TensorId, TensorId], tensor: TensorId) -> TensorId:
    """The tensor in front of a row of pairs that follow each other."""
    while tensor in taken_out:
        tensor = taken_out[tensor]
    return tensor


def describe_quantized(pairs: int, operators: int) -> str:
    """The message for a model with so many pairs and integer operators; "" for a float one."""
    counts = [(pairs, "pair"), (operators, "operator")]
    listed = " and ".join(
        f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count
    )
    return f"already quantized: {listed} kept" if listed else ""
