"""Bits written into a model: into its metadata by node name, into node metadata, and as attributes on request."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnx import ModelProto, NodeProto, helper

from onnxq.annotate.bits import (
    NODE_PREFIX,
    Origin,
    PairInfo,
    PairInfos,
    count_bits,
    list_specs,
    read_node_notes,
)
from onnxq.annotate.read import drop_attribute, list_pair_nodes, set_attribute
from onnxq.config import matches_any, suggest_names
from onnxq.emit import BITS_KEY
from onnxq.errors import CauseAndFix, ConfigError, PlanError
from onnxq.graph import choose_name, name_nodes
from onnxq.graph.scopes import map_entries, walk_all_nodes
from onnxq.plan import Plan, name_part
from onnxq.sites import Caution, Cautions, JsonObject
from onnxq.wording import join_names

# (pattern, bits), the first match holds.
Given = Sequence[tuple[str, int]]


def assign_bits(pairs: Iterable[PairInfo], *, given: Given, plan: Plan | None = None) -> PairInfos:
    """The pairs with the bits a person gave.

    given: (pattern, bits); a pattern is a glob or /regex/ over the site and the pair's node names, and the first match
    holds. Patterns come before `plan`, the plan before the file. int32 biases keep their 32 bits.

    Raises ConfigError or PlanError for a pattern or plan that fits no pair, and for bits that contradict a pair's type
    or stored values.
    """
    planned = tuple(pairs) if plan is None else _apply_plan(pairs, plan)
    assigned = []
    used = set()
    for pair in planned:
        names = (pair.name, *pair.nodes)
        for pattern, bits in given:
            if any(matches_any(pattern, name) for name in names):
                used.add(pattern)
                # A pattern such as "*" means the tensors that have a width to choose.
                if not (pair.role.is_bias and pair.storage == "int32"):
                    if problem := find_contradiction(pair, bits):
                        fix = "give other bits, or a narrower pattern before it"
                        raise ConfigError(f"bits: {pattern}={bits}", problem, fix, code="Q309")
                    pair = replace(pair, bits=bits, origin=Origin.GIVEN)
                break
        assigned.append(pair)
    for position, (pattern, bits) in enumerate(given):
        # One that stands twice is used where it stands first.
        if pattern not in used or pattern in [before for before, _ in given[:position]]:
            reason_and_fix = _explain_no_match(pattern, planned, given[:position])
            raise ConfigError(f"bits: {pattern}={bits}", *reason_and_fix, code="Q309")
    return tuple(assigned)


def write_bits(proto: ModelProto, pairs: Iterable[PairInfo]) -> ModelProto:
    """The model of `write_named_bits` with the attribute `bits`."""
    return write_named_bits(proto, tuple(pairs), rename=False, bits_attribute=True)[0]


def write_named_bits(
    proto: ModelProto,
    pairs: PairInfos,
    *,
    rename: bool,
    bits_attribute: bool,
) -> tuple[ModelProto, PairInfos]:
    """A copy of the model with the pairs' bits in it, and the pairs with the names that their nodes have there.

    The bits stand in the model's metadata, by node name, and in that of the nodes. proto: the model that the pairs were
    found in. rename: name the nodes after their site. bits_attribute: also write the integer attribute `bits` on Q and
    DQ (Sparsebit's form, see BITS_ATTRIBUTE_WARNING); without it such attributes are removed. Earlier notes of onnxq
    that are not about bits stay.
    """
    model = name_nodes(proto)
    nodes = {node.name: node for node in walk_all_nodes(model)}
    if rename:
        pairs = _rename_nodes(nodes, pairs)
        # By name, and the names have changed.
        nodes = {node.name: node for node in nodes.values()}
    records = {}
    # Fields of `make_record` first, so that records read alike whatever was noted before.
    blank = dict.fromkeys(("site", "bits", "scheme", "granularity", "role"), "")
    for pair in pairs:
        for name in pair.nodes:
            # A node that only the reading of integer operators makes is not in the file; the model's note has it.
            own = blank | read_node_notes(nodes[name]) if name in nodes else {}
            records[name] = {**own, **make_record(pair)}
            if name in nodes:
                _set_metadata(
                    nodes[name], {NODE_PREFIX + k: str(v) for k, v in records[name].items()}
                )
    for node in list_pair_nodes(model):
        drop_attribute(node)
        if bits_attribute and node.name in records:
            set_attribute(node, int(records[node.name]["bits"]))
    if records:
        _set_metadata(model, {BITS_KEY: json.dumps(records)})
    return model, pairs


def make_record(pair: PairInfo) -> JsonObject:
    """The note of a pair."""
    return {
        "site": pair.name,
        "bits": pair.bits,
        "scheme": pair.scheme,
        "granularity": pair.granularity.word,
        "role": str(pair.role),
    }


def _set_metadata(proto: ModelProto | NodeProto, values: dict[str, str]) -> None:
    before = map_entries(proto.metadata_props)
    # New values stand behind what stays.
    stays = {key: value for key, value in before.items() if key not in values}
    helper.set_metadata_props(proto, stays | values)


def _rename_nodes(nodes: dict[str, NodeProto], pairs: PairInfos) -> PairInfos:
    # The nodes that look rows of a table up are called after their Gather. A name that a renamed node gives up is free
    # for another.
    taken = set(nodes) - {name for pair in pairs for name in pair.nodes if not pair.lookup}
    new = {}

    def rename(pair: PairInfo, old: str, part: str) -> str:
        if old not in new and old in nodes:
            new[old] = nodes[old].name = choose_name(name_part(pair.site, part), taken)
        return new.get(old, old)

    renamed = []
    for pair in pairs:
        if not pair.lookup:
            clip = rename(pair, pair.clip, "clip_node")
            quantize = rename(pair, pair.quantize, "dynamic_node" if pair.dynamic else "q_node")
            dequantize = rename(pair, pair.dequantize, "dq_node")
            pair = replace(pair, clip=clip, quantize=quantize, dequantize=dequantize)
        renamed.append(pair)
    return tuple(renamed)


def _explain_no_match(pattern: str, pairs: PairInfos, before: Given) -> CauseAndFix:
    names = [name for pair in pairs for name in (pair.name, *pair.nodes)]
    if before and any(matches_any(pattern, name) for name in names):
        return (
            "matches only pairs that a pattern before it has taken",
            "put the narrower pattern first",
        )
    return "matches no pair of this model", suggest_names(pattern.strip("/*"), names)


def _apply_plan(pairs: Iterable[PairInfo], plan: Plan) -> PairInfos:
    """The pairs with the bits of the plan. Raises PlanError as `assign_bits` says."""
    by_site = {site.site: site.spec for site in plan.all_sites}
    by_node = list_specs(plan.all_sites)
    assigned = []
    for pair in pairs:
        spec = by_site.get(pair.site) or by_node.get(pair.dequantize) or by_node.get(pair.quantize)
        if spec is not None:
            problem = find_contradiction(pair, spec.bits)
            if problem:
                fix = "the plan belongs to another model, or was edited: plan again"
                raise PlanError(pair.name, problem, fix, code="Q404")
            pair = replace(pair, bits=spec.bits, symmetric=spec.symmetric, origin=Origin.PLAN)
        assigned.append(pair)
    if plan.all_sites and not any(pair.origin is Origin.PLAN for pair in assigned):
        first = str(plan.all_sites[0].site)
        cause = f"none of its {len(plan.all_sites)} sites is a pair of this model, e.g. {first}"
        near = suggest_names(first, (pair.name for pair in assigned))
        raise PlanError(plan.model or "plan", cause, near, code="Q404")
    return tuple(assigned)


def find_contradiction(pair: PairInfo, bits: int) -> str:
    """Why the pair cannot have these bits; "" where it can."""
    if not 1 <= bits <= pair.element_type.bits:
        return f"{pair.site} is stored as {pair.storage}, which is not {bits} bits wide"
    levels = pair.levels
    if levels is not None and count_bits(*levels, signed=pair.element_type.signed) > bits:
        return (
            f"{pair.site} uses the levels {levels[0]} to {levels[1]}, which {bits} bits cannot hold"
        )
    return ""


def is_unbound(pair: PairInfo, bits: int) -> bool:
    """True for the pair of a computed tensor whose type has more levels than so many bits, all of them in use."""
    narrower = bits < pair.element_type.bits
    return narrower and bool(pair.quantize) and not pair.clip and not pair.role.is_weight


def warn_of_sites(text: str, sites: Sequence[str]) -> Cautions:
    """The warning of these sites, with the first of their names; () without any."""
    if not sites:
        return ()
    return (Caution("W106", f"{text} ({len(sites)}): {join_names(sites, 3)}"),)


def warn_unbound(pairs: PairInfos) -> Cautions:
    """A warning for activations whose given bits are narrower than anything in the graph enforces."""
    loose = [
        pair.name for pair in pairs if pair.origin is Origin.GIVEN and is_unbound(pair, pair.bits)
    ]
    if not loose:
        return ()
    text = (
        "noted narrower than their type, but nothing bounds their levels: an engine that does not read the note "
        f"computes with all of them ({len(loose)}: {join_names(loose, 3)})"
    )
    return (Caution("W106", text),)
