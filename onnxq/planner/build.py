"""Graph, target and configuration in; a plan without numbers out. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.backends import Shapes, Target, describe_spec, find_target
from onnxq.config import Config
from onnxq.graph import Fingerprint, GraphIndex, ModelLike, compute_fingerprint, compute_structural_ids, get_index
from onnxq.plan import PlacementChoice, Plan, SitePlan, SitePlans
from onnxq.planner.choose import Choice, choose_ops, list_strategies
from onnxq.planner.place import Placer
from onnxq.planner.problem import NOTHING, Existing, PlacementProblem, is_between_pairs, state_problem
from onnxq.planner.requests import Requests
from onnxq.planner.sums import ALLOWED, bind_sums
from onnxq.planner.tables import Table, add_tables
from onnxq.sites import Caution, Cautions, Refusal, Role, TensorId, is_within, split_unquantized

# From these opsets on QuantizeLinear takes 4 and 16 bits and blocks, and FP8.
_WIDE_OPSET, _FLOAT8_OPSET = 21, 19
_WIDE = ("int4", "uint4", "int16", "uint16")


@dataclass(frozen=True, eq=False, kw_only=True)
class OnnxPlacement(PlacementProblem):
    """The placement problem of an ONNX model; `placed` turns any choice of operators into a plan.

    index: of `proto`; `ops.index` is of the same model without the pairs it came with. base: the plan without sites.
    tables: the embeddings that every plan quantizes.
    """

    proto: ModelLike
    index: GraphIndex
    base: Plan
    tables: tuple[Table, ...] = ()

    @cached_property
    def ids(self) -> Mapping[TensorId, str]:
        """Structural ids: the same for every choice of operators."""
        return compute_structural_ids(self.proto)

    def default(self, *, attention: bool = False) -> Plan:
        """The plan of the deterministic rules; `attention`: with the rules for it, where the target has them."""
        priced = self.engine.costs and self.config.mode != "weight-only"
        how = PlacementChoice(cpu=self.config.cpu if priced else "")
        return self.placed(choose_ops(self, attention=attention), how)

    def candidates(self) -> Mapping[str, frozenset[str]]:
        """Named choices for a placement that is measured."""
        return list_strategies(self)

    def placed(self, choice: Choice, how: PlacementChoice) -> Plan:
        """The plan for a choice of operators."""
        placement, existing = Placer(self).place(choice.chosen), self.ops.existing
        floats: tuple[str, ...] = ()
        if self.engine.quantizes_alone:
            view = self.ops.index
            # The graph without its pairs lacks what nobody reads, and that needs no guard; between pairs the engine
            # quantizes as the model came, and goes on to.
            live = {node.name for node in view.nodes}
            guarded = find_float_nodes(self.index, (*existing.constants, *placement.sites))
            floats = tuple(name for name in guarded if name in live and not is_between_pairs(view, existing, name))
        sites, nodes = anchor_sites(self.index, (*placement.existing, *placement.sites), floats, self.ids)
        count = len(placement.existing)
        refusals, left_float = split_unquantized((*choice.reasons, *self.base.refusals, *self.base.left_float))
        plan = replace(
            self.base,
            sites=sites[count:],
            existing=sites[:count],
            opset=max(self.base.opset, placement.opset, find_needed_opset(sites[count:], self.index)),
            refusals=refusals,
            left_float=left_float,
            warnings=(*self.base.warnings, *placement.warnings, *choice.warnings),
            float_nodes=floats,
            nodes=nodes,
            placement=how,
        )
        return self.with_tables(bind_sums(plan, self.index))

    def with_tables(self, plan: Plan) -> Plan:
        """A plan for this model with the tables' sites. Those that it quantizes as weights get further readers."""
        if not self.tables:
            return plan
        before, sites = {site.site: site for site in plan.sites}, add_tables(plan.sites, self.tables)
        changed, nodes = anchor_sites(self.index, [s for s in sites if s is not before.get(s.site)], (), self.ids)
        anchored = {site.site: site for site in changed}
        sites = tuple(anchored.get(site.site, site) for site in sites)
        opset = max(plan.opset, find_needed_opset(sites, self.index))
        return replace(plan, sites=sites, nodes={**plan.nodes, **nodes}, opset=opset)


def state_placement(
    proto: ModelLike,
    config: Config,
    *,
    shapes: Shapes | None = None,
    closed: Mapping[str, Refusal] | None = None,
    before: GraphIndex | None = None,
    prepare: tuple[str, ...] = (),
    name: str = "",
    identified: bool = True,
    existing: Existing = NOTHING,
) -> OnnxPlacement:
    """Look at a prepared model and state its placement problem.

    shapes: observed shapes, which the size rules need where the model's are symbolic.
    closed: scopes that stay float, with their refusals (a branch calibration never ran, a Loop body).
    before: index of the model as it came, whose names rules may use too.
    existing: the pairs that the model came with; new ones take their type where engines need both alike.
    identified: False leaves out the fingerprint of the model, for plans that nobody keeps.
    Raises ConfigError for a rule that matches nothing.
    """
    index = get_index(proto)
    closed = closed or {}
    config, cautions = _match_signs(existing, config)
    requests = Requests(config, index)
    requests.check_used(before or index)
    engine = find_target(config.target, config.mode)
    bare = index if existing.view is None else get_index(existing.view)
    problem = state_problem(
        bare, requests, engine, shapes=shapes or {}, existing=existing,
        closed=lambda node: any(is_within(node.scope, scope) for scope in closed),
    )  # fmt: skip
    print_of = compute_fingerprint(proto) if identified else Fingerprint("", "")
    without = (engine.without_kernel(node) for node in index.nodes)
    # The first reason for a node holds: a closed scope is why no rule looked at it.
    refusals, left_float = split_unquantized(
        (*closed.values(), *problem.ops.reasons, *(reason for reason in without if reason is not None))
    )
    base = Plan(
        target=config.target,
        model=name,
        topology=print_of.topology,
        weights=print_of.weights,
        prepare=prepare,
        nbits=config.accuracy_level if config.emit == "nbits" else None,
        saturation=config.saturation,
        warnings=(
            *cautions,
            *_find_unreadable(existing, engine, bare, index),
            *((ALLOWED,) if config.saturation == "allow" and engine.saturates else ()),
        ),
        existing=existing.sites,
        refusals=refusals,
        left_float=left_float,
        kept=tuple(node.name for node in index.nodes if node.op_type in ("QuantizeLinear", "DequantizeLinear")),
    )
    return OnnxPlacement(**vars(problem), proto=proto, index=index, base=base)


def _find_unreadable(existing: Existing, engine: Target, view: GraphIndex, index: GraphIndex) -> Cautions:
    """Warnings of pairs that the model came with, and of operators, that a strict target's engine refuses."""
    if not engine.strict:
        return ()
    unreadable = []
    nodes = {node.name: node for node in view.nodes}
    for site in existing.sites:
        readers = [nodes[edge.node] for edge in site.consumers or () if edge.node in nodes][:1]
        zero = site.qparams is not None and bool(site.qparams.zero_point.any()) and not engine.zero_points
        # Capabilities have rows for activations; an output is one that leaves the model.
        role = Role.ACTIVATION if site.role is Role.OUTPUT else site.role
        if role is Role.BIAS:
            wrong = not engine.int32_bias
        else:
            wrong = any(engine.refuse(site.spec, role, node) is not None for node in readers)
        if zero or wrong:
            unreadable.append(f"{site.site} ({describe_spec(site.spec)})")
    cautions = _find_unknown(engine, index)
    if not unreadable:
        return cautions
    line = f"{len(unreadable)} of the pairs that the model came with are kept, though {engine.name} does not read them"
    return (Caution("W125", f"{line}, e.g. {unreadable[0]}: quantize the float model for {engine.name}"), *cautions)


def _find_unknown(engine: Target, index: GraphIndex) -> Cautions:
    """A warning for each operator that the target's engine cannot read."""
    unknown: dict[tuple[str, str], list[str]] = {}
    for node in index.nodes:
        if reason := engine.refuse_float(node):
            unknown.setdefault((node.op_type, reason), []).append(node.name)
    return tuple(
        Caution("W129", f"{engine.name} cannot read {op} ({len(names)}, e.g. {names[0]}): {reason}")
        for (op, reason), names in unknown.items()
    )


def _match_signs(existing: Existing, config: Config) -> tuple[Config, Cautions]:
    """The configuration with the sign of the model's own activation pairs, and a line that says so.

    Kernels read and write one type, so a region that goes on from a pair of another sign would not fuse.
    """
    activations, byte = config.activations, ("int8", "uint8")
    signs = [site.spec.signed for site in existing.by_tensor.values() if site.spec.storage in byte]
    bytes_wanted = activations.bits <= 8 and activations.storage in ("", *byte)
    if not signs or not bytes_wanted or config.mode not in ("static", "auto"):
        return config, ()
    # Pairs of both signs fuse with neither: the majority decides.
    signed = 2 * sum(signs) > len(signs)
    if signed == activations.is_signed or not find_target(config.target, config.mode).zero_points:
        return config, ()
    update = {"signed": signed, "storage": "", "narrow_range": activations.narrow_range and signed}
    names = byte if signed else byte[::-1]
    line = f"activations are {names[0]} like the pairs that the model came with, not {names[1]}"
    return config.model_copy(update={"activations": activations.model_copy(update=update)}), (Caution("W124", line),)


def anchor_sites(
    index: GraphIndex, sites: Iterable[SitePlan], floats: Iterable[str], ids: Mapping[TensorId, str]
) -> tuple[SitePlans, dict[str, str]]:
    """The sites with their anchors, and the structural ids of the nodes that they and `floats` name."""
    done = tuple(replace(site, anchor=_find_anchor(index, site, ids)) for site in sites)
    named = dict.fromkeys([edge.node for site in done for edge in site.consumers or ()] + list(floats))
    return done, find_node_ids(index, named, ids)


def find_node_ids(index: GraphIndex, names: Iterable[str], ids: Mapping[TensorId, str]) -> dict[str, str]:
    """Structural ids of nodes by name, by which a plan finds them in another export."""
    return {name: _find_node_id(index, name, ids) for name in names}


def _find_anchor(index: GraphIndex, site: SitePlan, ids: Mapping[TensorId, str]) -> str:
    """Structural id of the tensor; of the reading node and its input for edges, weights and biases."""
    where = site.consumers[0] if site.role.is_constant and site.consumers else site.site
    if isinstance(where, TensorId):
        return ids.get(where, "")
    return f"{_find_node_id(index, where.node, ids)}/{where.index}"


def _find_node_id(index: GraphIndex, name: str, ids: Mapping[TensorId, str]) -> str:
    return ids.get(index.node(name).result, "")


# What ORT quantizes by itself when it stands between a DequantizeLinear and a QuantizeLinear.
_GUARDED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "AveragePool", "Softmax")


def find_float_nodes(index: GraphIndex, sites: Iterable[SitePlan]) -> tuple[str, ...]:
    """Nodes the plan leaves float though ORT might not."""
    int8 = {edge.node for site in sites if site.role is Role.WEIGHT for edge in site.consumers or ()}
    return tuple(node.name for node in index.nodes if node.op_type in _GUARDED and node.name not in int8)


def find_needed_opset(sites: Iterable[SitePlan], index: GraphIndex | None = None) -> int:
    """The lowest opset in which all these pairs can be written. index: of the model, None where none looks rows up.

    Rows are dequantized by operators that are no part of ONNX's opset, or old.
    """
    opset = 13
    for site in sites:
        looked_up = index is not None and site.consumers is not None and site.find_lookups(index) == site.consumers
        if looked_up:
            continue
        if site.spec.storage in _WIDE or site.spec.has_blocks:
            opset = max(opset, _WIDE_OPSET)
        elif site.spec.is_float:
            opset = max(opset, _FLOAT8_OPSET)
    return opset
