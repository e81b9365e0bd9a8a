"""The entries of a table of scales matched with the tensors of a model and the sites of its plan."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxq.errors import CalibrationError, PlanError, find_nearest, suggest_names
from onnxq.graph import FLOAT_TENSORS, LAYOUT_OPS, GraphIndex, NodeRef
from onnxq.interop.base import (
    ScaleTable,
    TensorScale,
    TensorScales,
    UnmatchedKind,
    UnusedLine,
    UnusedLines,
    sort_by_name,
)
from onnxq.interop.fitting import fit_numbers
from onnxq.plan import Plan, SitePlan, SitePlans
from onnxq.sites import Causes, Caution, Cautions, MaybeTensor, Names, Site, TensorId
from onnxq.spec import QParams
from onnxq.wording import show_as_summary

# Operators whose output 0 holds exactly the values of input 0, so that both have one range.
_SAME_VALUES = LAYOUT_OPS | {"Dropout", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"}
_CONSTANT = "a constant: weights get their scales from their values"
_BIAS = "a bias: its scale is its input's times its weight's"
_BIAS_BITS = 32


@dataclass(frozen=True, kw_only=True)
class MatchedSite:
    """A site and the line that its scale came from."""

    site: str
    # The tensor of the line, and its number in the file.
    name: str
    line: int
    scale: float
    # Why the scale of another tensor holds for the site; "" for the tensor's own.
    through: str = ""
    # What became of the numbers, where the site's type has other levels; "" where they are the file's.
    kept: str = ""


@dataclass(frozen=True, kw_only=True)
class MissingSite:
    """A site that the file has no scale for."""

    site: str
    tensor: str
    nearest: Names = ()
    # How the site got a scale otherwise; "" while it has none.
    done: str = ""


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Imported:
    """A plan with the scales of a file, and the outcome for every line of it and every site of the plan."""

    plan: Plan
    cache: str
    header: str
    # Number of lines with a scale.
    entries: int
    # In the order of the plan's sites.
    matched: tuple[MatchedSite, ...] = ()
    # Names that are no tensor of the prepared model.
    unmatched: UnusedLines = ()
    # Tensors of it that the plan does not quantize.
    unused: UnusedLines = ()
    missing: tuple[MissingSite, ...] = ()
    notes: Cautions = ()
    # How lines are counted: "line", or "entry" where the file has no lines.
    unit: str = "line"


@dataclass(frozen=True, eq=False)
class ScaleMatch:
    """The entry of each site, and the rest on both sides."""

    entries: Mapping[Site, TensorScale]
    qparams: Mapping[Site, QParams]
    matched: tuple[MatchedSite, ...]
    unmatched: UnusedLines
    unused: UnusedLines
    missing: SitePlans
    absent: tuple[MissingSite, ...]
    notes: Cautions


# The entry that a site takes, and why another tensor's scale holds for it.
_Taken = tuple[TensorScale, str]


def match_scales(
    table: ScaleTable, plan: Plan, before: GraphIndex, prepared: GraphIndex
) -> ScaleMatch:
    """Match each site of the plan with its entry of the table.

    before, prepared: the model as it came, and as the plan quantizes it. An activation whose own tensor has no line
    takes the line of a tensor with the same values (behind a Reshape, Transpose, Identity, …, in either model); sites
    that share one scale take the largest of theirs. A weight takes the scales of its own name, if preparation left its
    values.
    Raises CalibrationError when no name of the table is in the model, PlanError for a site that int8 scales do not fit.
    """
    by_name = sort_by_name(table.entries)
    _check_model(table, before, prepared)
    sites = [site for site in plan.sites if site.role.is_measured]
    taken, notes = _take_entries(table, plan, sites, _list_copies(before, prepared), prepared)
    # Sites that had no entry of their own come behind the others.
    matched = []
    left = {}
    numbers = {}
    by_site = plan.by_site
    for key, (entry, through) in taken.items():
        site = by_site[key]
        problem = _find_change(site, before, prepared)
        dims = prepared.find_shape(site.quantized_tensor) or ()
        shape = tuple(d if isinstance(d, int) else 0 for d in dims)
        qparams, kept = (
            (None, problem) if problem else fit_numbers(entry, site, table.origin, shape)
        )
        if qparams is None:
            left[entry.name] = kept
            continue
        numbers[key] = qparams
        matched.append(
            MatchedSite(
                site=str(key),
                name=entry.name,
                line=entry.line,
                scale=float(np.max(qparams.scale)),
                through=through,
                kept=kept,
            )
        )
    missing = tuple(site for site in sites if site.site not in numbers)
    used = {taken[key][0].line for key in numbers}
    rest = list(_explain_leftovers(table, used, left, before, prepared))
    return ScaleMatch(
        entries={site: entry for site, (entry, _) in taken.items()},
        qparams=numbers,
        matched=tuple(matched),
        unmatched=tuple(line for line in rest if line.why is not None),
        unused=tuple(line for line in rest if line.why is None),
        missing=missing,
        absent=tuple(_describe_missing(site, by_name) for site in missing),
        notes=notes,
    )


def _describe_missing(site: SitePlan, names: Iterable[str]) -> MissingSite:
    tensor = site.quantized_tensor.name
    return MissingSite(site=site.name, tensor=tensor, nearest=find_nearest(tensor, names, 2))


def _take_entries(
    table: ScaleTable,
    plan: Plan,
    sites: list[SitePlan],
    copies: _Copies,
    prepared: GraphIndex,
) -> tuple[dict[Site, _Taken], Cautions]:
    """The entry that each site takes, of activations (`sites`) and then of weights; and warnings of shared scales."""
    by_name = sort_by_name(table.entries)
    taken = {}
    for site in sites:
        nearest = _find_nearest_entry(site.quantized_tensor, by_name, copies)
        if nearest is not None:
            taken[site.site] = (_choose_entry(nearest[0], site, prepared), nearest[1])
    # In front of the check, since a site may take another's entry here.
    notes = tuple(_share_largest(sites, taken))
    for site in sites:
        # Tables of TensorRT hold symmetric int8 alone, and do not say so.
        if site.site in taken and table.only_int8:
            _check_fits(site, taken[site.site][0])
    for site in plan.sites:
        # After the activations, which may read a constant as one of theirs.
        if site.role.is_weight and site.site not in taken and site.quantized_tensor.name in by_name:
            taken[site.site] = (by_name[site.quantized_tensor.name][0], "")
    return taken, notes


def set_scales(plan: Plan, qparams: Mapping[Site, QParams]) -> Plan:
    """The plan with these numbers; other sites keep theirs."""
    sites = []
    for site in plan.sites:
        if site.site in qparams:
            # Weights whose numbers are given are not fitted to sums of 16 bits; the report says which overflow them.
            orders = () if site.role.is_weight else site.sum_orders
            site = replace(site, qparams=qparams[site.site], sum_orders=orders)
        sites.append(site)
    return plan.with_sites(sites)


def _choose_entry(group: TensorScales, site: SitePlan, index: GraphIndex) -> TensorScale:
    """Of the entries of a tensor the one that a site's readers read."""
    # TensorQuantOverrides have two entries for a tensor that some readers read in another type.
    readers = {edge.node for edge in site.find_readers(index)}
    some = (entry for entry in group if entry.readers and readers <= set(entry.readers))
    return next(some, group[0])


def _find_change(site: SitePlan, before: GraphIndex, prepared: GraphIndex) -> str:
    """Why numbers for a constant of the file are none for the prepared model's; "" where its values are the same."""
    if not site.role.is_weight:
        return ""
    tensor = site.quantized_tensor
    old, new = (
        index.find_constant(index.resolve_tensor(tensor.name, tensor.scope))
        for index in (before, prepared)
    )
    # A folded BatchNormalization, for one, scales the channels that the file's numbers are for.
    same = old is not None and new is not None and np.array_equal(old, new)
    return "" if same else "a weight whose values preparation changed"


def _check_fits(site: SitePlan, entry: TensorScale) -> None:
    spec = site.spec
    if spec.storage == "int8" and spec.bits == 8 and spec.symmetric and spec.has_one_scale:
        return
    raise PlanError(
        site.name,
        f"line {entry.line} of the cache is a scale of symmetric int8, and the configuration asks for "
        f"{spec.bits} bits, {spec.scheme}, {spec.storage} here",
        "leave activations at `bits: 8`, `scheme: symmetric`, `signed: true`",
    )


def _share_largest(sites: Iterable[SitePlan], taken: dict[Site, _Taken]) -> Iterator[Caution]:
    """Give all members of a sharing group the largest of their scales; the notes name those that differed.

    taken: changed in place.
    """
    groups = defaultdict(list)
    for site in sites:
        if site.group:
            groups[site.group].append(site.site)
    for members in groups.values():
        scales = [taken[site] for site in members if site in taken]
        if not scales:
            continue
        # The values of every member fit into the range of the largest.
        largest, through = max(scales, key=lambda pair: pair[0].span)
        if any(not _have_same_numbers(entry, largest) for entry, _ in scales):
            names = ", ".join(sorted({entry.name for entry, _ in scales}))
            text = f"{names} share one scale and differ in the cache: the largest, of {largest.name}, is used"
            yield Caution("W118", text)
        for member in members:
            if member not in taken or not _have_same_numbers(taken[member][0], largest):
                taken[member] = (largest, through or f"shares its scale with {largest.name}")


def _have_same_numbers(entry: TensorScale, other: TensorScale) -> bool:
    return (
        entry.spec == other.spec
        and np.array_equal(entry.scale, other.scale)
        and np.array_equal(entry.zero_point, other.zero_point)
    )


def _check_model(table: ScaleTable, before: GraphIndex, prepared: GraphIndex) -> None:
    """Raise CalibrationError when no name of the table is a tensor of the model."""
    names = _list_names(before) | _list_names(prepared)
    foreign = [entry.name for entry in table.entries if entry.name not in names]
    if len(foreign) == len(table.entries):
        # Names that the tool made up say nothing about the model, so another one is shown if there is one.
        first = next((name for name in foreign if not table.is_own_name(name)), foreign[0])
        cause = f"none of its {len(table.entries)} names is a tensor of the model; the first is {first!r}"
        fix = f"name the ONNX file that {table.tool} was calibrated with; {suggest_names(first, names)}"
        raise CalibrationError(table.source, cause, fix, code="Q506")


def _list_names(index: GraphIndex) -> set[str]:
    names = index.input_names
    for node in index.nodes:
        names.update(node.inputs, node.outputs)
    return names - {""}


def _explain_leftovers(
    table: ScaleTable,
    used: set[int],
    left: Causes,
    before: GraphIndex,
    prepared: GraphIndex,
) -> Iterator[UnusedLine]:
    """The lines that no site took, with the reason of each. left: of tensors whose numbers do not fit their site."""
    now = _list_names(prepared)
    then = _list_names(before)
    yield from table.skipped
    for entry in table.entries:
        name = entry.name
        if entry.line in used:
            continue
        source = _find_tensor(before, name)
        nearest: Names = ()
        why = None
        if name in left:
            reason = left[name]
        elif entry.spec.bits == _BIAS_BITS:
            reason = _BIAS
        elif name in now:
            reason = _explain_unused(prepared, name)
        elif before.is_constant(source):
            reason = _CONSTANT
        elif name in then:
            why = UnmatchedKind.FOLDED
            maker = before.find_producer(source)
            reason = "preparation folded it" + (f": {maker.op_type} {maker.name}" if maker else "")
        elif table.is_own_name(name):
            why = UnmatchedKind.TENSORRT
            reason = f"a layer {table.tool} added itself"
        else:
            why = UnmatchedKind.UNKNOWN
            reason = "the model has no such tensor"
            nearest = find_nearest(name, now | then)
        yield UnusedLine(name=name, line=entry.line, why=why, reason=reason, nearest=nearest)


def _explain_unused(index: GraphIndex, name: str) -> str:
    """Why a tensor of the model has no pair."""
    tensor = _find_tensor(index, name)
    if tensor is None:
        return "no pair stands on it"
    if index.is_constant(tensor):
        return _CONSTANT
    if not index.list_consumers(tensor):
        return "an output of the model stays float"
    return "the plan quantizes nothing that reads it"


def _find_tensor(index: GraphIndex, name: str) -> MaybeTensor:
    """The tensor of this name in the first scope that has one: tables know no scopes."""
    return next(
        (t for scope in index.scopes if (t := index.resolve_tensor(name, scope)) is not None), None
    )


# Tensor -> tensors with the same values that one node away hold them, each with the operator between.
_Copies = dict[str, dict[tuple[str, str], None]]


def _list_copies(*indexes: GraphIndex) -> _Copies:
    """Tensors that hold the same values; those that a tensor is a copy of come first."""
    steps = [
        (node.outputs[0], node.inputs[0], node.op_type)
        for index in indexes
        for node in index.nodes
        if _keeps_values(index, node)
    ]
    # The other way round behind them, so that the makers of a tensor come before its readers.
    steps += [(source, result, op_type) for result, source, op_type in steps]
    copies: _Copies = {}
    for tensor, twin, op_type in steps:
        copies.setdefault(tensor, {})[twin, op_type] = None
    return copies


def _find_nearest_entry(
    tensor: TensorId, by_name: Mapping[str, TensorScales], copies: _Copies
) -> tuple[TensorScales, str] | None:
    """The entries of the tensor itself, else of the nearest tensor with the same values, and how they were found."""
    # Breadth first, so that the fewest nodes stand between.
    pending = deque([(tensor.name, "")])
    visited = {tensor.name}
    while pending:
        name, op_type = pending.popleft()
        if name in by_name:
            return by_name[name], f"same values, by way of {op_type}" if op_type else ""
        for other, step in copies.get(name, ()):
            if other not in visited:
                visited.add(other)
                pending.append((other, op_type or step))
    return None


def _keeps_values(index: GraphIndex, node: NodeRef) -> bool:
    if node.domain or not node.inputs or not node.inputs[0] or not node.outputs[0]:
        return False
    # A Cast between float types changes values by rounding only.
    if node.op_type == "Cast":
        types = (index.find_dtype(index.find_input(node)), node.attrs.get("to"))
        return FLOAT_TENSORS.issuperset(types)
    return node.op_type in _SAME_VALUES


def list_consumers(sites: Iterable[SitePlan], index: GraphIndex) -> dict[str, str]:
    """Names of the nodes that make a site's pair necessary -> the site's tensor.

    These are its readers, and its producer where the pair stands behind that.
    """
    tensors: dict[str, str] = {}
    for site in sites:
        tensor = site.quantized_tensor
        names = [edge.node for edge in site.find_readers(index)]
        maker = index.find_producer(tensor) if site.consumers is None else None
        if maker is not None:
            names.append(maker.name)
        for name in names:
            tensors.setdefault(name, tensor.name)
    return tensors
