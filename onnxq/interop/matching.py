"""The lines of a cache matched with the tensors of the model and the sites of the plan."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxq.errors import CalibrationError, PlanError
from onnxq.graph import GraphIndex, NodeRef
from onnxq.interop.imported import MatchedSite, MissingSite, UnmatchedKind, UnusedLine
from onnxq.interop.trt_cache import ORIGIN, Cache, Entry
from onnxq.nearest import find_nearest, suggest_names
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Caution, Role, Site, TensorId
from onnxq.spec import PerTensor, QParams

# Operators whose output 0 holds exactly the values of input 0, so that both have one range.
_SAME_VALUES = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout", "Expand", "Tile",
     "DepthToSpace", "SpaceToDepth"}
)  # fmt: skip
_FLOATS = frozenset({1, 10, 11, 16})  # FLOAT, FLOAT16, DOUBLE, BFLOAT16
# Names that TensorRT gives to tensors of layers without an ONNX node.
_OWN_NAME = re.compile(r"\(Unnamed (Layer|ITensor)\* \d+\)")
_CONSTANT = "a constant: weights get their scales from their values"
# Roles whose scales come from calibration.
_RANGED = (Role.ACTIVATION, Role.OUTPUT)


@dataclass(frozen=True, eq=False)
class Findings:
    """The entry of each site, and the rest on both sides."""

    entries: Mapping[Site, Entry]
    matched: tuple[MatchedSite, ...]
    unmatched: tuple[UnusedLine, ...]
    unused: tuple[UnusedLine, ...]
    missing: tuple[SitePlan, ...]
    absent: tuple[MissingSite, ...]
    notes: tuple[Caution, ...]


def match_cache(cache: Cache, plan: Plan, before: GraphIndex, prepared: GraphIndex) -> Findings:
    """Match each activation site of the plan with its line of the cache.

    before, prepared: the model as it came, and as the plan quantizes it. A site whose own tensor has no line takes the
    line of a tensor with the same values (behind a Reshape, Transpose, Identity, …, in either model); sites that share
    one scale take the largest of theirs.
    Raises CalibrationError when no name of the cache is in the model, PlanError for a site that int8 scales do not fit.
    """
    known = {entry.name: entry for entry in cache.entries}
    _check_model(cache, before, prepared)
    kin = _Kin(before, prepared)
    found: dict[Site, tuple[Entry, str]] = {}
    missing = []
    for site in _list_activations(plan):
        taken = kin.nearest(site.quantized_tensor, known)
        if taken is None:
            missing.append(site)
        else:
            found[site.site] = taken
    notes = _share_largest(plan, found)
    missing = [site for site in missing if site.site not in found]
    for site in _list_activations(plan):
        if site.site in found:
            _check_fits(site, found[site.site][0])
    used = {entry.name for entry, _ in found.values()}
    unmatched, unused = _list_leftovers(cache, used, before, prepared)
    return Findings(
        entries={site: entry for site, (entry, _) in found.items()},
        matched=tuple(
            MatchedSite(site=str(site), name=entry.name, line=entry.line, scale=float(entry.scale), through=through)
            for site, (entry, through) in found.items()
        ),
        unmatched=unmatched,
        unused=unused,
        missing=tuple(missing),
        absent=tuple(
            MissingSite(site=str(site.site), tensor=tensor, nearest=find_nearest(tensor, known, 2))
            for site, tensor in ((site, site.quantized_tensor.name) for site in missing)
        ),
        notes=notes,
    )


def set_scales(plan: Plan, entries: Mapping[Site, Entry]) -> Plan:
    """The plan with these scales and zero points of 0; other sites keep their numbers."""
    zero = np.array(0, np.int32)
    numbers = {site: QParams(np.array(entry.scale), zero, ORIGIN) for site, entry in entries.items()}
    return plan.with_sites(tuple(replace(site, qparams=numbers.get(site.site, site.qparams)) for site in plan.sites))


def _list_activations(plan: Plan) -> Iterator[SitePlan]:
    return (site for site in plan.sites if site.role in _RANGED)


def _check_fits(site: SitePlan, entry: Entry) -> None:
    spec = site.spec
    if spec.storage == "int8" and spec.bits == 8 and spec.symmetric and isinstance(spec.granularity, PerTensor):
        return
    raise PlanError(
        str(site.site),
        f"line {entry.line} of the cache is a scale of symmetric int8, and the configuration asks for "
        f"{spec.bits} bits, {'symmetric' if spec.symmetric else 'asymmetric'}, {spec.storage} here",
        "leave activations at `bits: 8`, `scheme: symmetric`, `signed: true`",
    )


def _share_largest(plan: Plan, found: dict[Site, tuple[Entry, str]]) -> tuple[Caution, ...]:
    """Give all members of a sharing group the largest of their scales; the notes name those that differed.

    found: changed in place.
    """
    groups: dict[str, list[Site]] = {}
    for site in _list_activations(plan):
        if site.group:
            groups.setdefault(site.group, []).append(site.site)
    notes = []
    for members in groups.values():
        given = [found[site] for site in members if site in found]
        if not given:
            continue
        # The values of every member fit into the range of the largest.
        largest, through = max(given, key=lambda pair: pair[0].scale)
        if any(entry.scale != largest.scale for entry, _ in given):
            names = ", ".join(sorted({entry.name for entry, _ in given}))
            text = f"{names} share one scale and differ in the cache: the largest, of {largest.name}, is used"
            notes.append(Caution("W118", text))
        for member in members:
            if member not in found or found[member][0].scale != largest.scale:
                found[member] = (largest, through or f"shares its scale with {largest.name}")
    return tuple(notes)


def _check_model(cache: Cache, before: GraphIndex, prepared: GraphIndex) -> None:
    """Raise CalibrationError when no name of the cache is a tensor of the model."""
    names = _list_names(before) | _list_names(prepared)
    foreign = [entry.name for entry in cache.entries if entry.name not in names]
    named = [name for name in foreign if not _OWN_NAME.match(name)]
    if len(foreign) == len(cache.entries):
        # Names that TensorRT made up say nothing about the model, so another one is shown if there is one.
        first = named[0] if named else foreign[0]
        cause = f"none of its {len(cache.entries)} names is a tensor of the model; the first is {first!r}"
        fix = f"name the ONNX file that TensorRT was calibrated with; {suggest_names(first, names)}"
        raise CalibrationError(cache.source, cause, fix, code="Q506")


def _list_names(index: GraphIndex) -> set[str]:
    inputs = {value.name for value in index.inputs}
    return inputs | {name for node in index.nodes for name in (*node.inputs, *node.outputs) if name}


def _list_leftovers(
    cache: Cache, used: set[str], before: GraphIndex, prepared: GraphIndex
) -> tuple[tuple[UnusedLine, ...], tuple[UnusedLine, ...]]:
    """The lines that no site took: those of no tensor of the prepared model, and those of tensors left float."""
    now, then = _list_names(prepared), _list_names(before)
    unmatched, unused = [], []
    for entry in cache.entries:
        if entry.name in used:
            continue
        at_first = _find_tensor(before, entry.name)
        line = UnusedLine(name=entry.name, line=entry.line)
        if entry.name in now:
            unused.append(replace(line, reason=_explain_unused(prepared, entry.name)))
        elif at_first is not None and before.is_constant(at_first):
            unused.append(replace(line, reason=_CONSTANT))
        elif entry.name in then:
            maker = next((node for node in before.nodes if entry.name in node.outputs), None)
            reason = f"preparation folded it: {maker.op_type} {maker.name}" if maker else "preparation folded it"
            unmatched.append(replace(line, why=UnmatchedKind.FOLDED, reason=reason))
        elif _OWN_NAME.match(entry.name):
            unmatched.append(replace(line, why=UnmatchedKind.TENSORRT, reason="a layer TensorRT added itself"))
        else:
            close, reason = find_nearest(entry.name, now | then), "the model has no such tensor"
            unmatched.append(replace(line, why=UnmatchedKind.UNKNOWN, reason=reason, nearest=close))
    return tuple(unmatched), tuple(unused)


def _explain_unused(index: GraphIndex, name: str) -> str:
    """Why a tensor of the model has no pair."""
    tensor = _find_tensor(index, name)
    if tensor is None:
        return "no pair stands on it"
    if index.is_constant(tensor):
        return _CONSTANT
    if not index.consumers(tensor):
        return "an output of the model stays float"
    return "the plan quantizes nothing that reads it"


def _find_tensor(index: GraphIndex, name: str) -> TensorId | None:
    """The tensor of this name in the first scope that has one: caches know no scopes."""
    return next((t for scope in index.scopes if (t := index.resolve(name, scope)) is not None), None)


class _Kin:
    """Tensors that hold the same values, by name, in the model as it came and as prepared."""

    def __init__(self, *indexes: GraphIndex) -> None:
        # Name -> (name, operator between) of tensors that it is a copy of, and of its copies.
        self._sources: dict[str, list[tuple[str, str]]] = {}
        self._copies: dict[str, list[tuple[str, str]]] = {}
        for index in indexes:
            for node in index.nodes:
                if _keeps_values(index, node):
                    _add_step(self._sources, node.outputs[0], node.inputs[0], node.op_type)
                    _add_step(self._copies, node.inputs[0], node.outputs[0], node.op_type)

    def nearest(self, tensor: TensorId, known: Mapping[str, Entry]) -> tuple[Entry, str] | None:
        """The entry of the tensor itself, else of the nearest tensor with the same values, and how it was found."""
        # Breadth first, so that the fewest nodes stand between.
        pending = deque([(tensor.name, "")])
        seen = {tensor.name}
        while pending:
            name, op_type = pending.popleft()
            if name in known:
                return known[name], f"same values, by way of {op_type}" if op_type else ""
            for other, step in (*self._sources.get(name, ()), *self._copies.get(name, ())):
                if other not in seen:
                    seen.add(other)
                    pending.append((other, op_type or step))
        return None


def _add_step(table: dict[str, list[tuple[str, str]]], key: str, value: str, op_type: str) -> None:
    row = table.setdefault(key, [])
    if (value, op_type) not in row:
        row.append((value, op_type))


def _keeps_values(index: GraphIndex, node: NodeRef) -> bool:
    if node.domain not in ("", "ai.onnx") or not node.inputs or not node.inputs[0] or not node.outputs[0]:
        return False
    # A Cast between float types changes values by rounding only.
    if node.op_type == "Cast":
        source = index.input(node, 0)
        return source is not None and index.dtype(source) in _FLOATS and node.attrs.get("to") in _FLOATS
    return node.op_type in _SAME_VALUES


def list_consumers(sites: Iterable[SitePlan], index: GraphIndex) -> dict[str, str]:
    """Names of the nodes that make a site's pair necessary -> the site's tensor.

    These are its readers, and its producer where the pair stands behind that.
    """
    found: dict[str, str] = {}
    for site in sites:
        tensor = site.quantized_tensor
        edges = index.consumers(tensor) if site.consumers is None else site.consumers
        maker = index.producer(tensor) if site.consumers is None else None
        for name in [edge.node for edge in edges] + ([maker.name] if maker is not None else []):
            found.setdefault(name, tensor.name)
    return found
