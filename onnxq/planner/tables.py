"""Tables of embeddings: large constants of which Gather looks rows up, to be stored in few bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.errors import OnnxqError
from onnxq.graph import GraphIndex, NodeRef
from onnxq.numerics import fake_quant, weight_qparams
from onnxq.plan import SitePlan, SitePlans
from onnxq.planner.choose import BY_PERSON
from onnxq.planner.problem import PlacementProblem
from onnxq.planner.requests import Match
from onnxq.sites import Edges, LeftFloat, Refusal, Role, TensorId, Unquantized
from onnxq.spec import FloatType, PerChannel, QuantSpec

# The rule that sites and reasons name.
EMBEDDING_ROWS = "embedding-rows"
# Elements below which scales and nodes take more than the rounding saves, and the share of the largest table below
# which one is small: positions and types beside words (2 % in all-MiniLM-L6).
_LEAST_ELEMENTS, _LEAST_SHARE = 2**12, 0.05
# dB that 99 of 100 rows must have in eight bits. all-MiniLM-L6 has 40; single outliers in a row cost the others.
_GOOD_ROWS_DB = 30.0
# Rows looked at for that, evenly spread: a table may have gigabytes.
_JUDGED_ROWS = 4096

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
    twin: TensorId | None = None

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
            site=self.tensor, role=Role.WEIGHT, spec=self.spec, observer=self.match.request.observer,
            rule=EMBEDDING_ROWS, reason=reason, consumers=self.lookups, tensor=self.tensor,
        )  # fmt: skip


def choose_tables(
    problem: PlacementProblem, index: GraphIndex, sites: Sequence[SitePlan]
) -> tuple[tuple[Table, ...], tuple[Unquantized, ...]]:
    """The tables to quantize beside these sites, and why others stay float.

    index: of the prepared model. With `embeddings: auto` those that rules name, and all large ones in mode weight-only
    or where they are more than half of the bytes of the weights.
    """
    mode, request, reasons = problem.config.mode, problem.config.embeddings, list[Unquantized]()
    # In mode float nothing is quantized.
    tables = [] if mode == "float" else list(_find_tables(problem, index, reasons))
    least = max(_LEAST_ELEMENTS, _LEAST_SHARE * max((table.elements for table in tables), default=0))
    large = [table for table in tables if table.named or table.elements >= least]
    all_of_them = request in ("int8", "int4")
    if request == "auto":
        # Weights alone are quantized for the size of the file, of which a float table is four times its share or more.
        all_of_them = mode == "weight-only" or _are_most(large, index, sites)
    weights = {site.site: site for site in sites if site.role is Role.WEIGHT}
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


def _find_tables(problem: PlacementProblem, index: GraphIndex, reasons: list[Unquantized]) -> Iterator[Table]:
    """Every table that no rule leaves float; `reasons` gets those that one does."""
    looked_at: set[TensorId] = set()
    for node in index.nodes:
        tensor = index.input(node, 0) if node.looks_up(0) else None
        if tensor is None or tensor in looked_at or not _is_table(index, tensor):
            continue
        looked_at.add(tensor)
        lookups, others, gathers = [], [], []
        for edge in index.consumers(tensor):
            reader = index.node(edge.node)
            if reader.looks_up(edge.index):
                lookups.append(edge)
                gathers.append(reader)
            else:
                others.append(edge)
        match = problem.requests.match_table(tensor, gathers)
        if match.rule is not None and match.rule.set.float:
            reasons.append(LeftFloat(node.name, f"left float by {match.rule.describe()}", BY_PERSON, "F101"))
            continue
        try:
            spec = problem.requests.make_spec(match, Role.WEIGHT, node)
        except OnnxqError as error:
            reasons.append(Refusal(node.name, f"{error.subject}: {error.cause}", error.fix, EMBEDDING_ROWS, "R103"))
            continue
        yield Table(tensor, _count_elements(index, tensor), tuple(lookups), tuple(others), match, spec)


def _is_table(index: GraphIndex, tensor: TensorId) -> bool:
    """True for a constant matrix of floats. Most models in a narrower type are planned in float32."""
    matrix = len(index.shape(tensor) or ()) == 2 and index.dtype(tensor) in _WIDTHS
    return matrix and index.is_constant(tensor) and not index.is_output(tensor)


def _count_elements(index: GraphIndex, tensor: TensorId) -> int:
    return math.prod(dim for dim in index.shape(tensor) or () if isinstance(dim, int))


def _are_most(tables: Iterable[Table], index: GraphIndex, sites: Iterable[SitePlan]) -> bool:
    """True when the tables would be more than half of the bytes of all weights, with these sites."""
    bits = {site.quantized_tensor: site.spec.storage_bits for site in sites if site.role is Role.WEIGHT}
    total = 0
    for tensor in {tensor for node in index.nodes for tensor in index.list_reads(node)}:
        width = _WIDTHS.get(index.dtype(tensor), 0)
        if width and index.is_constant(tensor):
            total += _count_elements(index, tensor) * min(bits.get(tensor, width), width)
    return 2 * sum(table.elements * _WIDTHS[index.dtype(table.tensor)] for table in tables) > total


def _find_obstacle(
    problem: PlacementProblem, index: GraphIndex, table: Table, weight: SitePlan | None
) -> Unquantized | None:
    """Why the table stays float; None where it can be quantized. weight: the site of its other readers."""
    engine, node = problem.engine, index.node(table.lookups[0].node)
    demanded = table.named or problem.config.embeddings != "auto"
    row = engine.capability(table.spec, Role.WEIGHT, node.op_type)
    if row is None or node.op_type not in row.ops:
        if not demanded:
            return _leave_float(node, f"{engine.name} looks embeddings up in float tables only")
        refusal = engine.refuse(table.spec, Role.WEIGHT, node)
        if refusal is None:
            refusal = Refusal(node.name, f"{engine.name} reads tables in float", "it stays float")
        return Refusal(node.name, refusal.reason, refusal.fix, EMBEDDING_ROWS, "R103")
    shared = weight is not None and weight.spec == table.spec and {*table.others} <= {*(weight.consumers or ())}
    if table.others and not shared:
        other = table.others[0].node
        return _leave_float(node, f"{other} reads the same table in another type, and it would be stored twice")
    if demanded or weight is not None:
        return None
    rows_db = _measure_rows(index, table)
    reason = f"in int8 one row of a hundred has less than {rows_db:.0f} dB, and {_GOOD_ROWS_DB:.0f} are asked"
    return None if rows_db >= _GOOD_ROWS_DB else _leave_float(node, reason)


def _find_twin(index: GraphIndex, table: Table, weights: Iterable[SitePlan]) -> TensorId | None:
    """The weight that preparation made of the table by transposing it, if its site can have the table's integers."""
    value = index.constant(table.tensor)
    if value is None or table.spec.granularity != PerChannel(0):
        return None
    spec = replace(table.spec, granularity=PerChannel(1))
    for site in weights:
        if site.spec == spec and site.site.scope == table.tensor.scope and isinstance(site.site, TensorId):
            other = index.constant(site.site)
            if other is not None and other.shape == value.shape[::-1] and np.array_equal(other.T, value):
                return site.site
    return None


def _leave_float(node: NodeRef, reason: str) -> LeftFloat:
    return LeftFloat(node.name, reason, EMBEDDING_ROWS, "F109")


def explain_loss(tables: Iterable[Table], before: float, after: float) -> tuple[LeftFloat, ...]:
    """Why tables stay float that cost the outputs too much. before, after: SQNR in dB without and with them."""
    reason = f"in int8 the embeddings cost too much: {after:.1f} dB at the outputs, {before:.1f} dB without"
    return tuple(LeftFloat(table.lookups[0].node, reason, EMBEDDING_ROWS, "F109") for table in tables)


def _measure_rows(index: GraphIndex, table: Table) -> float:
    """The SQNR in dB that all but the worst hundredth of the rows have; rows of zeros are exact."""
    value = index.constant(table.tensor)
    assert value is not None
    value = value[:: max(1, len(value) // _JUDGED_ROWS)].astype(np.float32)
    error = fake_quant(value, weight_qparams(value, table.spec), table.spec)
    error -= value
    noise, power = (np.einsum("ij,ij->i", array, array, dtype=np.float64) for array in (error, value))
    rows = 10 * np.log10(np.maximum(power, 1e-30) / np.maximum(noise, 1e-36))
    return float(np.percentile(rows, 1))


def add_tables(sites: SitePlans, tables: Iterable[Table]) -> SitePlans:
    """The sites with those of the tables; a site that quantizes the table for other readers gets the lookups as well.

    A table whose other readers have become float is left out.
    """
    added = {site.site: site for site in sites}
    for table in tables:
        weight, twin = added.get(table.tensor), None if table.twin is None else added.get(table.twin)
        if weight is not None:
            readers = tuple(dict.fromkeys((*(weight.consumers or ()), *table.lookups)))
            added[table.tensor] = replace(weight, consumers=readers)
        elif not table.others:
            group = "" if twin is None else str(twin.site)
            added[table.tensor] = replace(table.make_site(), group=group)
            if twin is not None:
                added[twin.site] = replace(twin, group=group)
    return tuple(added.values())
