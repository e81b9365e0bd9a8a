"""The pairs that a model came with, for planning: their numbers, their readers, and the model without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxq.annotate.bits import Notes, Numbers, is_quantizer_clip, read_notes, read_numbers
from onnxq.annotate.find import Chain, find_chains, is_dequantize, is_quantize
from onnxq.annotate.read import describe_pair, drop_clip
from onnxq.emit import PLAN_KEY
from onnxq.errors import OnnxqError
from onnxq.graph import Editor, GraphIndex, ModelLike, NodeRef, get_index
from onnxq.plan import Plan, SitePlan, from_json
from onnxq.planner import KEPT, NOTHING, Existing
from onnxq.sites import Edge, Site, TensorId
from onnxq.spec import PerTensor, QParams, QuantSpec

_REASON = "the model came with this pair"
# Nodes that may stand between a weight's DequantizeLinear and the node that multiplies by it.
_MOVES = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"})


def find_existing(proto: ModelLike) -> Existing:
    """The pairs of a prepared model whose scales are constants, and the model without them (the view).

    Half a pair, at an operator that computes on integers itself, counts as one. Pairs that no other reader could share
    stay in the view and out of the result: those with scales computed at run time or per channel of an activation, and
    those whose QuantizeLinear and DequantizeLinear differ.
    """
    index = get_index(proto)
    if not any(is_dequantize(node) or is_quantize(node) for node in index.nodes):
        return NOTHING
    finder = _Finder(index, read_notes(proto), _list_planned(proto))
    for chain in find_chains(index):
        finder.add(chain)
    return finder.result()


def read_plan_note(proto: ModelLike) -> Plan | None:
    """The plan in the model's metadata; None without one, and for one that cannot be read."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == PLAN_KEY), None)
    try:
        return None if text is None else from_json(text, source=PLAN_KEY)
    except OnnxqError:
        return None


def _list_planned(proto: ModelLike) -> dict[Site, SitePlan]:
    """The sites of the plan that the model was written from; {} without one."""
    plan = read_plan_note(proto)
    return {} if plan is None else {site.site: site for site in plan.all_sites}


@dataclass(eq=False)
class _Finder:
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

    def add(self, chain: Chain) -> None:
        """Add one chain to the result, if it is a pair that can be taken out of the view."""
        # Rows of a table are looked up as the model came: nobody shares them, and no reader can do without the Gather.
        if chain.lookup is not None:
            return
        node = chain.last
        numbers = read_numbers(self.index, chain)
        if not is_quantizer_clip(self.index, chain, numbers):
            chain = drop_clip(self.index, chain)
        if chain.source is None or numbers.scale is None:
            return
        made, edges = node.result, self.index.consumers(node.result)
        if chain.dequantize is None or (chain.quantize is None and not self.index.is_constant(chain.source)):
            self._add_half(chain, numbers, made, edges)
            return
        if self.index.is_constant(chain.source):
            self.weighted.update(self._multiplying(edges))
            # Its readers cannot read the integers as they are stored.
            if chain.inner is not None and chain.inner.op_type == "Transpose":
                return
            site = self._site(chain, numbers, edges)
            self.constants.extend([site] if site is not None else [])
        elif not self._shareable(chain, numbers, made, edges):
            return
        self.taken_out[made] = chain.source
        self.direct.update(edges)

    def _add_half(self, chain: Chain, numbers: Numbers, made: TensorId, edges: tuple[Edge, ...]) -> None:
        """Add a node that stands alone between float and an operator on integers.

        Other readers of a QuantizeLinear get a DequantizeLinear when the pairs are written.
        """
        begins = chain.quantize is None
        tensor = made if begins else chain.source
        site = self._site(chain, numbers, edges if begins else ())
        if tensor is None or site is None or not isinstance(numbers.granularity, PerTensor):
            return
        if tensor in self.by_tensor or site.spec.storage not in ("int8", "uint8"):
            return
        site = replace(site, site=tensor)
        self.sites[tensor] = site
        self.by_tensor[tensor] = tensor
        self.halves.append(chain.last)
        if begins:
            self.by_edge.update(dict.fromkeys(edges, tensor))
            self.direct.update(edges)

    def _shareable(self, chain: Chain, numbers: Numbers, made: TensorId, edges: tuple[Edge, ...]) -> bool:
        """Add the pair of a computed tensor. False for one that stays in the view."""
        quantizer, source = chain.quantize, chain.source
        if quantizer is None or source is None or not isinstance(numbers.granularity, PerTensor):
            return False
        if not self._same_numbers(quantizer, chain.last):
            return False
        site = self._site(chain, numbers, edges)
        if site is None:
            return False
        alike = self.sites.get(self.by_tensor.get(source, made))
        if alike is not None and alike.site.scope == made.scope and _match_numbers(alike, site):
            # A second DequantizeLinear, or a second pair with the same numbers: one site.
            site = replace(alike, consumers=(*(alike.consumers or ()), *edges))
        self.sites[site.site] = site
        if source not in self.by_tensor and made.scope == source.scope:
            self.by_tensor[source] = site.site
        for edge in edges:
            self.by_edge[edge] = site.site
            guard = self.index.node(edge.node)
            # A guard hands the same values on, so its readers read this pair too.
            if is_guard(guard):
                self.taken_out[guard.result] = source
                self.by_edge.update(dict.fromkeys(self.index.consumers(guard.result), site.site))
        return True

    def _site(self, chain: Chain, numbers: Numbers, edges: tuple[Edge, ...]) -> SitePlan | None:
        """The pair as a site with its numbers; None where no QuantSpec describes it."""
        info = describe_pair(self.index, chain, self.notes)
        made = chain.last.result
        known = self.planned.get(info.site)
        try:
            spec = QuantSpec(
                bits=info.bits,
                signed=numbers.element_type.signed,
                symmetric=info.symmetric,
                # The file does not tell it apart; only onnxq's own plan does.
                narrow_range=known is not None and known.spec.narrow_range,
                granularity=numbers.granularity,
                storage=numbers.storage,
            )
        except OnnxqError:
            return None
        scale = np.asarray(numbers.scale, np.float32)
        zero = np.zeros(scale.shape, np.int32) if numbers.zero_point is None else numbers.zero_point.astype(np.int32)
        alike = isinstance(numbers.granularity, PerTensor)
        # Tools write the one scale of a tensor with shape [] or [1].
        if not (scale.size == zero.size == 1 if alike else scale.shape == zero.shape):
            return None
        # No plan can record such a scale, and nothing is worth sharing it.
        if not np.isfinite(scale).all():
            return None
        if alike:
            scale, zero = scale.reshape(()), zero.reshape(())
        base = known if known is not None else SitePlan(site=info.site, role=info.role, spec=spec, reason=_REASON)
        return replace(
            base,
            site=made if self._is_taken(info.site, made, chain) else info.site,
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

    def _is_taken(self, site: Site, made: TensorId, chain: Chain) -> bool:
        """True when another pair has this name, or the float constant that a stored weight was once made from."""
        if site in self.sites:
            return True
        if not isinstance(site, TensorId) or chain.quantize is not None:
            return False
        return self.index.resolve(site.name, site.scope) not in (None, made, chain.source)

    def _same_numbers(self, quantizer: NodeRef, dequantizer: NodeRef) -> bool:
        for k in (1, 2):
            first, second = (self.index.input(node, k) for node in (quantizer, dequantizer))
            if first == second:
                continue
            one, two = (self.index.constant(t) for t in (first, second))
            if one is None or two is None or not np.array_equal(one, two):
                return False
        return True

    def _multiplying(self, edges: Iterable[Edge]) -> set[str]:
        """Names of the nodes that read a dequantized constant, also through nodes that only move it."""
        found: set[str] = set()
        pending = list(edges)
        while pending:
            node = self.index.node(pending.pop().node)
            if node.name in found:
                continue
            found.add(node.name)
            if node.op_type in _MOVES:
                pending += self.index.consumers(node.result)
        return found

    def result(self) -> Existing:
        """The pairs found, with the view."""
        # A model output must keep its name, so the node that makes it stays, as Identity.
        given_out = [made for made in self.taken_out if not made.scope and self.index.is_output(made)]
        makers = [self.index.producer(made) for made in given_out]
        stand_ins = [*self.halves, *(node for node in makers if node is not None)]
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


def _match_numbers(one: SitePlan, other: SitePlan) -> bool:
    return one.spec == other.spec and one.qparams == other.qparams


def _build_view(index: GraphIndex, taken_out: Mapping[TensorId, TensorId], stand_ins: Iterable[NodeRef]) -> ModelLike:
    """The model in which readers of dequantized tensors read the float ones; for planning only, it is never run.

    taken_out: dequantized tensor -> tensor that its readers get. stand_ins: nodes that become Identity; those that make
    outputs of the model are among them.
    """
    editor = Editor(index.model)
    for made, source in taken_out.items():
        name = _trace_source(taken_out, source).name
        editor.rewire(made, name, consumers=editor.consumers(made), outputs=bool(made.scope))
    for node in stand_ins:
        traced = _trace_source(taken_out, node.result)
        _make_identity(editor, node, traced.name if traced != node.result else node.inputs[0])
    editor.remove_unused()
    return editor.export()


def _trace_source(taken_out: Mapping[TensorId, TensorId], tensor: TensorId) -> TensorId:
    """The tensor in front of a row of pairs that follow each other."""
    while tensor in taken_out:
        tensor = taken_out[tensor]
    return tensor


def _make_identity(editor: Editor[ModelLike], node: NodeRef, source: str) -> None:
    """Make the node an Identity on `source`."""
    editor.set_op(node.name, "Identity")
    editor.replace_input(node.make_edge(0), source)
    for k in range(1, len(node.inputs)):
        editor.replace_input(node.make_edge(k), "")


def describe_quantized(pairs: int, operators: int) -> str:
    """The message for a model with so many pairs and integer operators; "" for a float one."""
    counts = [(pairs, "pair"), (operators, "operator")]
    told = " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)
    return f"already quantized: {told} kept" if told else ""


__all__ = ["describe_quantized", "find_existing", "is_guard", "read_plan_note"]
