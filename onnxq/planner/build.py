"""Graph, target and configuration in; a plan without numbers out, tables of embeddings too. Nothing is changed here."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from onnxq.backends import Shapes, Target, find_target
from onnxq.config import Config, change_fields
from onnxq.errors import OnnxqError
from onnxq.graph import DEQUANTIZE, QUANTIZE, GraphIndex, ModelLike, NodeRef, get_index
from onnxq.graph.identity import Fingerprint, compute_fingerprint, compute_structural_ids
from onnxq.numerics import fake_quant, weight_qparams
from onnxq.numerics.machine import CPU_KINDS
from onnxq.plan import PlacementChoice, Plan, SitePlan, SitePlans
from onnxq.plan.model import LEAST_OPSET
from onnxq.planner.choose import Choice, choose_ops, leave_by_rule, list_strategies
from onnxq.planner.place import Placer, find_float_nodes
from onnxq.planner.problem import (
    NOTHING,
    Existing,
    PlacementProblem,
    is_between_pairs,
    state_problem,
)
from onnxq.planner.requests import Match, Requests, list_looped, list_refusals
from onnxq.planner.sums import bind_sums, warn_allowed
from onnxq.sites import (
    Caution,
    Cautions,
    Edges,
    LeftFloat,
    MaybeTensor,
    NameSet,
    Refusal,
    Role,
    TensorId,
    Unquantized,
    UnquantizedNodes,
    drop_repeats,
    is_within,
    split_unquantized,
)
from onnxq.spec import FloatType, PerChannel, QuantSpec, describe_spec

# The rule that sites and reasons name.
EMBEDDING_ROWS = "embedding-rows"
# Elements below which scales and nodes take more than the rounding saves, and the share of the largest table below
# which one is small: positions and types beside words (2 % in all-MiniLM-L6).
_LEAST_ELEMENTS = 2**12
_LEAST_SHARE = 0.05
# dB that 99 of 100 rows must have in eight bits. all-MiniLM-L6 has 40; single outliers in a row cost the others.
_GOOD_ROWS_DB = 30.0
# Rows looked at for that, evenly spread: a table may have gigabytes.
_JUDGED_ROWS = 4096
# The structural id of each tensor.
Ids = Mapping[TensorId, str]
# Bits of the types that tables have.
_WIDTHS = {FloatType.FLOAT32.onnx_type: 32, FloatType.FLOAT16.onnx_type: 16}


@dataclass(frozen=True, eq=False)
class Table:
    """One table. lookups: the Gathers that read it. others: readers of the whole of it. match: the request.

    twin: the site of its transpose, a weight whose scales per channel are those of the rows.
    """

    tensor: TensorId
    elements: int
    lookups: Edges
    others: Edges
    match: Match
    spec: QuantSpec
    twin: MaybeTensor = None

    @property
    def named(self) -> bool:
        """True when a rule of the configuration asks for it."""
        return self.match.rule is not None

    def make_site(self) -> SitePlan:
        """The site of its rows, without numbers."""
        reason = "rows are dequantized behind the Gather, which reads the stored integers"
        if self.match.rule is not None:
            reason = f"{reason}; {self.match.rule.describe()}"
        return SitePlan(
            site=self.tensor,
            role=Role.WEIGHT,
            spec=self.spec,
            observer=self.match.request.observer,
            rule=EMBEDDING_ROWS,
            reason=reason,
            consumers=self.lookups,
            tensor=self.tensor,
        )


def choose_tables(
    problem: PlacementProblem, index: GraphIndex, sites: Sequence[SitePlan]
) -> tuple[tuple[Table, ...], UnquantizedNodes]:
    """The tables to quantize beside these sites, and why others stay float.

    index: of the prepared model. With `embeddings: auto` those that rules name, and all large ones in mode weight-only
    or where they are more than half of the bytes of the weights.
    """
    mode = problem.config.mode
    request = problem.config.embeddings
    reasons = list[Unquantized]()
    # In mode float nothing is quantized.
    tables = [] if mode == "float" else list(_find_tables(problem, index, reasons))
    largest = max((table.elements for table in tables), default=0)
    least = max(_LEAST_ELEMENTS, _LEAST_SHARE * largest)
    large = [table for table in tables if table.named or table.elements >= least]
    all_of_them = request in ("int8", "int4")
    if request == "auto":
        # Weights alone are quantized for the size of the file, of which a float table is four times its share or more.
        all_of_them = mode == "weight-only" or _are_most(large, index, sites)
    weights = {site.site: site for site in sites if site.role.is_weight}
    chosen = []
    for table in large:
        if not (table.named or all_of_them):
            continue
        obstacle = _find_obstacle(problem, index, table, weights.get(table.tensor))
        if obstacle is not None:
            reasons.append(obstacle)
        elif mode in ("static", "dynamic"):
            chosen.append(replace(table, twin=_find_twin(index, table, weights.values())))
        else:
            # MatMulNBits, which weights alone become, does not form behind a Transpose: there each has its own copy.
            chosen.append(table)
    return tuple(chosen), tuple(reasons)


def _find_tables(
    problem: PlacementProblem, index: GraphIndex, reasons: list[Unquantized]
) -> Iterator[Table]:
    """Every table that no rule leaves float; `reasons` gets those that one does."""
    looked_at = set()
    for node in index.nodes:
        tensor = index.find_input(node) if node.looks_up(0) else None
        if tensor is None or tensor in looked_at:
            continue
        # Most models in a narrower type are planned in float32.
        matrix = len(index.find_shape(tensor) or ()) == 2 and index.find_dtype(tensor) in _WIDTHS
        if not matrix or not index.is_constant(tensor) or index.is_output(tensor):
            continue
        looked_at.add(tensor)
        edges = index.list_consumers(tensor)
        lookups = tuple(edge for edge in edges if index.find_node(edge.node).looks_up(edge.index))
        others = tuple(edge for edge in edges if edge not in lookups)
        gathers = [index.find_node(edge.node) for edge in lookups]
        match = problem.requests.match_table(tensor, gathers)
        if match.rule is not None and match.rule.set.float:
            reasons.append(leave_by_rule(node.name, match.rule))
            continue
        try:
            spec = problem.requests.make_spec(match, Role.WEIGHT, node)
        except OnnxqError as error:
            reasons.append(Refusal(node.name, error.fault, error.fix, EMBEDDING_ROWS, "R103"))
            continue
        yield Table(tensor, _count_elements(index, tensor), lookups, others, match, spec)


def _count_elements(index: GraphIndex, tensor: TensorId) -> int:
    return math.prod(index.find_sizes(tensor) or ())


def _are_most(tables: Iterable[Table], index: GraphIndex, sites: Iterable[SitePlan]) -> bool:
    """True when the tables would be more than half of the bytes of all weights, with these sites."""
    weights = [site for site in sites if site.role.is_weight]
    bits = {site.quantized_tensor: site.spec.storage_bits for site in weights}
    total = 0
    for tensor in {tensor for node in index.nodes for tensor in index.list_reads(node)}:
        width = _WIDTHS.get(index.find_dtype(tensor), 0)
        if width and index.is_constant(tensor):
            total += _count_elements(index, tensor) * min(bits.get(tensor, width), width)
    own = sum(table.elements * _WIDTHS[index.find_dtype(table.tensor)] for table in tables)
    return 2 * own > total


def _find_obstacle(
    problem: PlacementProblem, index: GraphIndex, table: Table, weight: SitePlan | None
) -> Unquantized | None:
    """Why the table stays float; None where it can be quantized. weight: the site of its other readers."""
    engine = problem.engine
    node = index.find_node(table.lookups[0].node)
    demanded = table.named or problem.config.embeddings != "auto"
    row = engine.capability(table.spec, Role.WEIGHT, node.op_type)
    if row is None or node.op_type not in row.ops:
        if not demanded:
            return _leave_float(node, f"{engine.name} looks embeddings up in float tables only")
        refusal = engine.refuse(table.spec, Role.WEIGHT, node) or Refusal(
            node.name, f"{engine.name} reads tables in float", "it stays float"
        )
        return replace(refusal, subject=node.name, rule=EMBEDDING_ROWS, code="R103")
    alike = weight is not None and weight.spec == table.spec
    served = weight.named_consumers if weight is not None and alike else ()
    if not {*table.others} <= {*served}:
        reason = f"{table.others[0].node} reads the same table in another type, and it would be stored twice"
        return _leave_float(node, reason)
    if demanded or weight is not None:
        return None
    rows_db = _measure_rows(index, table)
    reason = f"in int8 one row of a hundred has less than {rows_db:.0f} dB, and {_GOOD_ROWS_DB:.0f} are asked"
    return None if rows_db >= _GOOD_ROWS_DB else _leave_float(node, reason)


def _find_twin(index: GraphIndex, table: Table, weights: Iterable[SitePlan]) -> MaybeTensor:
    """The weight that preparation made of the table by transposing it, if its site can have the table's integers."""
    value = index.find_constant(table.tensor)
    if value is None or table.spec.granularity != PerChannel(0):
        return None
    spec = replace(table.spec, granularity=PerChannel(1))
    for site in weights:
        tensor = site.site
        if site.spec != spec or not isinstance(tensor, TensorId):
            continue
        other = index.find_constant(tensor) if tensor.scope == table.tensor.scope else None
        # Of another shape it is not equal, either.
        if other is not None and np.array_equal(other.T, value):
            return tensor
    return None


def _leave_float(node: NodeRef, reason: str) -> LeftFloat:
    return LeftFloat(node.name, reason, EMBEDDING_ROWS, "F109")


def _measure_rows(index: GraphIndex, table: Table) -> float:
    """The SQNR in dB that all but the worst hundredth of the rows have; rows of zeros are exact."""
    value = index.find_constant(table.tensor)
    assert value is not None
    value = value[:: max(1, len(value) // _JUDGED_ROWS)].astype(np.float32)
    error = fake_quant(value, weight_qparams(value, table.spec), table.spec)
    error -= value
    noise, power = (np.einsum("ij,ij->i", a, a, dtype=np.float64) for a in (error, value))
    rows = 10 * np.log10(np.maximum(power, 1e-30) / np.maximum(noise, 1e-36))
    return float(np.percentile(rows, 1))


def add_tables(sites: SitePlans, tables: Iterable[Table]) -> SitePlans:
    """The sites with those of the tables; a site that quantizes the table for other readers gets the lookups as well.

    A table whose other readers have become float is left out.
    """
    added = {site.site: site for site in sites}
    for table in tables:
        weight = added.get(table.tensor)
        twin = None if table.twin is None else added.get(table.twin)
        if weight is not None:
            readers = drop_repeats((*weight.named_consumers, *table.lookups))
            added[table.tensor] = replace(weight, consumers=readers)
        elif not table.others:
            group = "" if twin is None else twin.name
            added[table.tensor] = replace(table.make_site(), group=group)
            if twin is not None:
                added[twin.site] = replace(twin, group=group)
    return tuple(added.values())


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
    def ids(self) -> Ids:
        """Structural ids: the same for every choice of operators."""
        return compute_structural_ids(self.proto)

    def default(self, *, attention: bool = False) -> Plan:
        """The plan of the deterministic rules; `attention`: with the rules for it, where the target has them."""
        # Costs of WebAssembly are not by kinds of CPU.
        kinds = {table.split()[0] for table in self.engine.costs} & CPU_KINDS.keys()
        priced = kinds and self.config.mode != "weight-only"
        how = PlacementChoice(cpu=self.config.cpu if priced else "")
        return self.placed(choose_ops(self, attention=attention), how)

    def candidates(self) -> Mapping[str, NameSet]:
        """Named choices for a placement that is measured."""
        return list_strategies(self)

    def placed(self, choice: Choice, how: PlacementChoice) -> Plan:
        """The plan for a choice of operators."""
        placement = Placer(self, choice.chosen).place()
        existing = self.ops.existing
        view = self.ops.index
        # The graph without its pairs lacks what nobody reads, and that needs no guard; between pairs the engine
        # quantizes as the model came, and goes on to.
        live = {node.name for node in view.nodes}
        guarded = find_float_nodes(self.index, (*existing.constants, *placement.sites), self.engine)
        floats = tuple(
            name for name in guarded if name in live and not is_between_pairs(view, existing, name)
        )
        placed = placement.existing + placement.sites
        anchored, nodes = anchor_sites(self.index, placed, floats, self.ids)
        count = len(placement.existing)
        sites = anchored[count:]
        refusals, left_float = split_unquantized(choice.reasons + self.base.unquantized)
        opset = max(self.base.opset, placement.opset, find_needed_opset(sites, self.index))
        plan = replace(
            self.base,
            sites=sites,
            existing=anchored[:count],
            opset=opset,
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
        before = plan.by_site
        sites = add_tables(plan.sites, self.tables)
        changed = [site for site in sites if site is not before.get(site.site)]
        changed_sites, nodes = anchor_sites(self.index, changed, (), self.ids)
        anchored = {site.site: site for site in changed_sites}
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

    shapes: observed shapes, which the size rules need where the model's are symbolic. closed: scopes that stay float,
    with their refusals (a branch calibration never ran, a Loop body). before: index of the model as it came, whose
    names rules may use too. existing: the pairs that the model came with; new ones take their type where engines need
    both alike. identified: False leaves out the fingerprint of the model, for plans that nobody keeps.
    Raises ConfigError for a rule that matches nothing.
    """
    index = get_index(proto)
    closed = closed or {}
    config, cautions = _match_signs(existing, config)
    engine = find_target(config.target, config.mode)
    looped = list_looped(index, engine, closed)
    requests = Requests(config, index, looped=looped)
    requests.check_used(before or index)
    bare = index if existing.view is None else get_index(existing.view)

    def is_closed(node: NodeRef) -> bool:
        return node.name not in looped and any(is_within(node.scope, scope) for scope in closed)

    problem = state_problem(
        bare, requests, engine, shapes=shapes or {}, existing=existing, closed=is_closed
    )
    print_of = compute_fingerprint(proto) if identified else Fingerprint("", "")
    without = [reason for node in index.nodes if (reason := engine.without_kernel(node))]
    # The first reason for a node holds: a closed scope is why no rule looked at it.
    refused = list_refusals(index, closed, looped)
    refusals, left_float = split_unquantized((*refused, *problem.ops.reasons, *without))
    base = Plan(
        target=config.target,
        model=name,
        topology=print_of.topology,
        weights=print_of.weights,
        prepare=prepare,
        nbits=config.accuracy_level if config.emit == "nbits" else None,
        qoperators=config.emit == "qoperator",
        saturation=config.saturation,
        warnings=(
            *cautions,
            *_find_unreadable(existing, engine, bare, index),
            *warn_allowed(config.target, config.saturation),
        ),
        existing=existing.sites,
        refusals=refusals,
        left_float=left_float,
        kept=tuple(node.name for node in index.nodes if node.op_type in (QUANTIZE, DEQUANTIZE)),
    )
    return OnnxPlacement(**vars(problem), proto=proto, index=index, base=base)


def _find_unreadable(
    existing: Existing, engine: Target, view: GraphIndex, index: GraphIndex
) -> Cautions:
    """Warnings of pairs that the model came with, and of operators, that a strict target's engine refuses."""
    if not engine.strict:
        return ()
    unreadable = []
    for site in existing.sites:
        readers = [
            view.named[edge.node] for edge in site.named_consumers if edge.node in view.named
        ][:1]
        shifted = site.qparams is not None and bool(site.qparams.zero_point.any())
        # Capabilities have rows for activations; an output is one that leaves the model.
        role = Role.ACTIVATION if site.role is Role.OUTPUT else site.role
        if role.is_bias:
            wrong = not engine.int32_bias
        else:
            wrong = any(engine.refuse(site.spec, role, node) is not None for node in readers)
        if wrong or (shifted and not engine.zero_points):
            unreadable.append(f"{site.site} ({describe_spec(site.spec)})")
    cautions = _find_unknown(engine, index)
    if not unreadable:
        return cautions
    text = (
        f"{len(unreadable)} of the pairs that the model came with are kept, though {engine.name} does not read them, "
        f"e.g. {unreadable[0]}: quantize the float model for {engine.name}"
    )
    return (Caution("W125", text), *cautions)


def _find_unknown(engine: Target, index: GraphIndex) -> Cautions:
    """A warning for each operator that the target's engine cannot read."""
    unknown = defaultdict(list)
    for node in index.nodes:
        if reason := engine.refuse_float(node):
            unknown[(node.op_type, reason)].append(node.name)
    return tuple(
        Caution("W129", f"{engine.name} cannot read {op} ({len(names)}, e.g. {names[0]}): {reason}")
        for (op, reason), names in unknown.items()
    )


def _match_signs(existing: Existing, config: Config) -> tuple[Config, Cautions]:
    """The configuration with the sign of the model's own activation pairs, and a line that says so.

    Kernels read and write one type, so a region that goes on from a pair of another sign would not fuse.
    """
    activations = config.activations
    byte = ("int8", "uint8")
    signs = [site.spec.signed for site in existing.by_tensor.values() if site.spec.storage in byte]
    bytes_wanted = activations.bits <= 8 and activations.storage in ("", *byte)
    if not signs or not bytes_wanted or config.mode not in ("static", "auto"):
        return config, ()
    # Pairs of both signs fuse with neither: the majority decides.
    signed = 2 * sum(signs) > len(signs)
    if signed == activations.is_signed or not find_target(config.target, config.mode).zero_points:
        return config, ()
    names = byte if signed else byte[::-1]
    line = f"activations are {names[0]} like the pairs that the model came with, not {names[1]}"
    narrow = activations.narrow_range and signed
    activations = change_fields(activations, signed=signed, storage="", narrow_range=narrow)
    return change_fields(config, activations=activations), (Caution("W124", line),)


def anchor_sites(
    index: GraphIndex, sites: Iterable[SitePlan], floats: Iterable[str], ids: Ids
) -> tuple[SitePlans, dict[str, str]]:
    """The sites with their anchors, and the structural ids of the nodes that they and `floats` name."""
    done = tuple(replace(site, anchor=_find_anchor(index, site, ids)) for site in sites)
    readers = [edge.node for site in done for edge in site.named_consumers]
    return done, find_node_ids(index, dict.fromkeys((*readers, *floats)), ids)


def find_node_ids(index: GraphIndex, names: Iterable[str], ids: Ids) -> dict[str, str]:
    """Structural ids of nodes by name, by which a plan finds them in another export."""
    return {name: _find_node_id(index, name, ids) for name in names}


def _find_anchor(index: GraphIndex, site: SitePlan, ids: Ids) -> str:
    """Structural id of the tensor; of the reading node and its input for edges, weights and biases."""
    where = site.consumers[0] if site.role.is_constant and site.consumers else site.site
    if isinstance(where, TensorId):
        return ids.get(where, "")
    return f"{_find_node_id(index, where.node, ids)}/{where.index}"


def _find_node_id(index: GraphIndex, name: str, ids: Ids) -> str:
    return ids.get(index.find_node(name).result, "")


def find_needed_opset(sites: Iterable[SitePlan], index: GraphIndex | None = None) -> int:
    """The lowest opset in which all these pairs can be written. index: of the model, None where none looks rows up."""
    return max((site.find_opset(index) for site in sites), default=LEAST_OPSET)
