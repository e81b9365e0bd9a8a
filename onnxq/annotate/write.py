"""Writing bits into a model by every carrier asked for; the node name is the key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import ModelProto, NodeProto, StringStringEntryProto

from onnxq.annotate.bits import bits_for
from onnxq.annotate.files import ATTRIBUTE, drop_attribute, pair_nodes, set_attribute
from onnxq.annotate.model import Inspection, Origin, PairInfo
from onnxq.annotate.notes import NODE_PREFIX, specs_by_node
from onnxq.annotate.operators import find_operators
from onnxq.annotate.read import find_pairs, prepare
from onnxq.config import did_you_mean, matches
from onnxq.emit import BITS_KEY
from onnxq.errors import ConfigError, PlanError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.graph.scopes import all_graphs
from onnxq.plan import Plan
from onnxq.plan.names import part
from onnxq.sites import Caution, Role
from onnxq.spec import GRAIN_NAMES

BITS_ATTRIBUTE_WARNING = Caution(
    "W105",
    "the attribute `bits` is in the file as asked: TensorRT's parser accepts it, "
    "onnx.checker and ONNX Runtime refuse to load such a file",
)
"""Belongs beside every file written with such attributes."""

Given = Sequence[tuple[str, int]]


def annotate_model(
    source: str | Path | ModelProto,
    *,
    given: Given = (),
    plan: Plan | None = None,
    rename: bool = False,
    bits_attribute: bool = False,
) -> Inspection:
    """Find the pairs of a model, settle their bits (`with_bits`) and write them into a copy (`write_bits`).

    The pairs returned say where their bits came from, under the names their nodes have in the copy.
    Raises ModelError for a file that cannot be read, and what `with_bits` raises.
    """
    proto, warnings = prepare(source)
    had = sum(any(a.name == ATTRIBUTE for a in node.attribute) for node in pair_nodes(proto))
    pairs = with_bits(find_pairs(proto), given=given, plan=plan)
    model, pairs = _write(proto, pairs, rename=rename, bits_attribute=bits_attribute)
    warnings = (*warnings, *_unbound(pairs))
    if bits_attribute:
        warnings = (*warnings, BITS_ATTRIBUTE_WARNING)
    elif had:
        text = f"{had} attributes `bits` became metadata, so that every engine loads the file"
        warnings = (*warnings, Caution("W106", text))
    name = "" if isinstance(source, ModelProto) else str(source)
    operators = find_operators(GraphIndex(name_nodes(model)))
    return Inspection(model, pairs, source=name, warnings=warnings, operators=operators)


def with_bits(pairs: Iterable[PairInfo], *, given: Given = (), plan: Plan | None = None) -> tuple[PairInfo, ...]:
    """The pairs with the bits a person gave.

    given: (pattern, bits); a pattern is a glob or /regex/ over the site and the pair's node names, the first that
    matches wins, and it comes before `plan`, which comes before what the file says. int32 biases keep their 32 bits.
    Raises ConfigError or PlanError for a pattern or plan that fits no pair, and for bits that a pair's type or stored
    values contradict.
    """
    found = tuple(pairs)
    if plan is not None:
        found = _from_plan(found, plan)
    return _from_patterns(found, given)


def write_bits(
    proto: ModelProto, pairs: Iterable[PairInfo], *, rename: bool = False, bits_attribute: bool = False
) -> ModelProto:
    """A copy of the model with the pairs' bits in it: model metadata by node name, and metadata of the nodes.

    proto must be the model the pairs were found in. rename: name the nodes after their site. bits_attribute: also the
    integer attribute `bits` on Q and DQ (Sparsebit's form, see BITS_ATTRIBUTE_WARNING); without it such attributes go.
    What onnxq noted before and is not about bits stays.
    """
    return _write(proto, tuple(pairs), rename=rename, bits_attribute=bits_attribute)[0]


def _write(
    proto: ModelProto, pairs: tuple[PairInfo, ...], *, rename: bool, bits_attribute: bool
) -> tuple[ModelProto, tuple[PairInfo, ...]]:
    model = name_nodes(proto)
    nodes = {node.name: node for _, graph in all_graphs(model) for node in graph.node}
    if rename:
        pairs = _rename(nodes, pairs)
        nodes = {node.name: node for node in nodes.values()}
    records: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        for name in pair.nodes:
            records[name] = {**_own_notes(nodes[name]), **_record(pair)}
            _set_metadata(nodes[name].metadata_props, {NODE_PREFIX + k: str(v) for k, v in records[name].items()})
    for node in pair_nodes(model):
        drop_attribute(node)
        if bits_attribute and node.name in records:
            set_attribute(node, int(records[node.name]["bits"]))
    if records:
        _set_metadata(model.metadata_props, {BITS_KEY: json.dumps(records)})
    return model, pairs


def _record(pair: PairInfo) -> dict[str, Any]:
    return {
        "site": str(pair.site),
        "bits": pair.bits,
        "scheme": pair.scheme,
        "granularity": GRAIN_NAMES[type(pair.granularity)],
        "role": str(pair.role),
    }


def _own_notes(node: NodeProto) -> dict[str, Any]:
    order = ("site", "bits", "scheme", "granularity", "role")
    found = {e.key.removeprefix(NODE_PREFIX): e.value for e in node.metadata_props if e.key.startswith(NODE_PREFIX)}
    return {**dict.fromkeys(order, ""), **found}


def _set_metadata(entries: Any, values: dict[str, str]) -> None:
    kept = [(entry.key, entry.value) for entry in entries if entry.key not in values]
    del entries[:]
    entries.extend(StringStringEntryProto(key=key, value=value) for key, value in (*kept, *values.items()))


def _rename(nodes: dict[str, NodeProto], pairs: tuple[PairInfo, ...]) -> tuple[PairInfo, ...]:
    changing = {name for pair in pairs for name in pair.nodes}
    taken = set(nodes) - changing
    new: dict[str, str] = {}

    def fresh(old: str, wanted: str) -> str:
        if not old or old in new:
            return new.get(old, "")
        name, number = wanted, 0
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        taken.add(name)
        new[old] = nodes[old].name = name
        return name

    return tuple(
        replace(
            pair,
            clip=fresh(pair.clip, part(pair.site, "clip_node")),
            quantize=fresh(pair.quantize, part(pair.site, "q_node")),
            dequantize=fresh(pair.dequantize, part(pair.site, "dq_node")),
        )
        for pair in pairs
    )


def _from_patterns(pairs: tuple[PairInfo, ...], given: Given) -> tuple[PairInfo, ...]:
    out, hits = [], set()
    for pair in pairs:
        names = (str(pair.site), *pair.nodes)
        position = next((k for k, (pattern, _) in enumerate(given) if any(matches(pattern, n) for n in names)), None)
        if position is None:
            out.append(pair)
            continue
        hits.add(position)
        pattern, bits = given[position]
        if pair.role is Role.BIAS and pair.storage == "int32":
            out.append(pair)
            continue
        problem = _contradiction(pair, bits)
        if problem:
            raise ConfigError(
                f"bits: {pattern}={bits}", problem, "give other bits, or a narrower pattern before it", code="Q309"
            )
        out.append(replace(pair, bits=bits, origin=Origin.GIVEN))
    for position, (pattern, bits) in enumerate(given):
        if position not in hits:
            raise ConfigError(f"bits: {pattern}={bits}", *_no_match(pattern, pairs, given[:position]), code="Q309")
    return tuple(out)


def _no_match(pattern: str, pairs: tuple[PairInfo, ...], before: Given) -> tuple[str, str]:
    names = [name for pair in pairs for name in (str(pair.site), *pair.nodes)]
    if before and any(matches(pattern, name) for name in names):
        return "matches only pairs that a pattern before it has taken", "put the narrower pattern first"
    return "matches no pair of this model", did_you_mean(pattern.strip("/*"), names)


def _from_plan(pairs: tuple[PairInfo, ...], plan: Plan) -> tuple[PairInfo, ...]:
    by_site = {site.site: site.spec for site in plan.all_sites}
    by_node = specs_by_node(plan)
    out = []
    for pair in pairs:
        spec = by_site.get(pair.site) or by_node.get(pair.dequantize) or by_node.get(pair.quantize)
        if spec is None:
            out.append(pair)
            continue
        problem = _contradiction(pair, spec.bits)
        if problem:
            raise PlanError(
                str(pair.site), problem, "the plan belongs to another model, or was edited: plan again", code="Q404"
            )
        out.append(replace(pair, bits=spec.bits, symmetric=spec.symmetric, origin=Origin.PLAN))
    if plan.all_sites and not any(pair.origin is Origin.PLAN for pair in out):
        first = plan.all_sites[0].site
        raise PlanError(
            plan.model or "plan", f"none of its {len(plan.all_sites)} sites is a pair of this model, e.g. {first}",
            did_you_mean(str(first), (str(pair.site) for pair in pairs)), code="Q404")  # fmt: skip
    return tuple(out)


def _contradiction(pair: PairInfo, bits: int) -> str:
    width = pair.element_type.bits
    if not 1 <= bits <= width:
        return f"{pair.site} is stored as {pair.storage}, which is not {bits} bits wide"
    levels = pair.levels
    if levels is not None and bits_for(*levels, signed=pair.element_type.signed) > bits:
        return f"{pair.site} uses the levels {levels[0]} to {levels[1]}, which {bits} bits cannot hold"
    return ""


def _unbound(pairs: tuple[PairInfo, ...]) -> tuple[Caution, ...]:
    loose = [
        str(pair.site)
        for pair in pairs
        if pair.origin is Origin.GIVEN and pair.quantize and not pair.clip and pair.bits < pair.element_type.bits
        and pair.role is not Role.WEIGHT
    ]  # fmt: skip
    if not loose:
        return ()
    names = ", ".join(loose[:3]) + (" …" if len(loose) > 3 else "")
    text = "noted narrower than their type, but nothing bounds their levels: an engine that does not read the note"
    return (Caution("W106", f"{text} computes with all of them ({len(loose)}: {names})"),)
