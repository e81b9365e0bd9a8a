"""Whether the notes of bits agree with the numbers in the graph, with each other, and with the nodes that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxq.annotate.bits import (
    Notes,
    Numbers,
    PairInfo,
    list_specs,
    read_clip_bits,
    read_clip_levels,
    read_noted_bits,
    read_notes,
    read_numbers,
)
from onnxq.annotate.find import Chain, find_chains
from onnxq.annotate.read import ATTRIBUTE, describe_pair, read_named
from onnxq.annotate.write import find_contradiction, is_unbound
from onnxq.graph import GraphIndex
from onnxq.graph.integer_products import read_integer_products
from onnxq.plan import Plan
from onnxq.sites import Cautions
from onnxq.wording import abbreviate, show_html


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A note of bits that does not say what the file does."""

    # The site of the pair; the name of the node for one that is gone.
    site: str
    # Where the note stands, and what it says.
    noted: str
    # What is there in its place.
    found: str
    why: str


@dataclass(frozen=True, eq=False)
class BitsCheck:
    """The notes of a model that disagree with its numbers."""

    __repr__ = abbreviate
    _repr_html_ = show_html

    # Path of the file, "" for a model in memory.
    source: str
    # Number of pairs, and of those of them that carry a note.
    pairs: int
    noted: int
    disagreements: tuple[Disagreement, ...]
    warnings: Cautions = ()


def check_notes(source: str | Path | ModelProto, *, plan: Plan | None = None) -> BitsCheck:
    """Compare every note of bits with the graph, and with the other notes of its pair.

    plan: compared in the place of the one in the model's metadata. Raises ModelError for a file that cannot be read.
    """
    proto, warnings = read_named(source)
    index, notes = GraphIndex(read_integer_products(proto)), read_notes(proto, plan)
    pairs, noted, faults = [], 0, []
    for chain in find_chains(index):
        written = _list_written(chain, notes)
        numbers, pair = read_numbers(index, chain), describe_pair(index, chain, notes)
        pairs.append(pair)
        noted += bool(written)
        texts = {
            bits: ", ".join(f"{carrier} {bits}" for carrier, value in written if value == bits) for _, bits in written
        }
        for bits, text in texts.items():
            fault = _find_fault(index, chain, numbers, pair, bits)
            if fault is not None:
                faults.append(Disagreement(site=str(pair.site), noted=text, found=fault[0], why=fault[1]))
        if len(texts) > 1:
            first, *others = texts.values()
            why = "the notes of one pair name different bits"
            faults.append(Disagreement(site=str(pair.site), noted=first, found="; ".join(others), why=why))
    faults += _find_gone({node.name for node in index.nodes}, pairs, notes)
    name = "" if isinstance(source, ModelProto) else str(source)
    return BitsCheck(name, len(pairs), noted, tuple(faults), warnings)


def _list_written(chain: Chain, notes: Notes) -> list[tuple[str, int]]:
    """(carrier, bits) of each note of a chain, each once."""
    found: dict[tuple[str, int], None] = {}
    for node in chain.nodes:
        attribute = node.attrs.get(ATTRIBUTE)
        values = {
            "model metadata": read_noted_bits(notes.by_node.get(node.name)),
            "node metadata": read_noted_bits(notes.own.get(node.name)),
            "attribute": attribute if isinstance(attribute, int) else None,
            "plan": notes.plan[node.name].bits if node.name in notes.plan else None,
        }
        found |= {(carrier, bits): None for carrier, bits in values.items() if bits is not None}
    return list(found)


def _find_fault(index: GraphIndex, chain: Chain, numbers: Numbers, pair: PairInfo, bits: int) -> tuple[str, str] | None:
    """(what is there, why it is not so many bits) of a pair; None where it can be as noted."""
    problem, width = find_contradiction(pair, bits), pair.element_type.bits
    if problem:
        found = pair.storage if pair.levels is None or bits > width else f"{pair.levels[0]}..{pair.levels[1]}"
        return found, problem
    clipped = read_clip_bits(index, chain, numbers) if pair.clip else None
    if clipped not in (None, bits):
        return f"{clipped} bits", f"Clip {pair.clip} enforces {_format_levels(index, chain, numbers)}"
    if is_unbound(pair, bits):
        return pair.storage, "a label alone: nothing bounds the levels, so engines compute with all of the type's"
    return None


def _format_levels(index: GraphIndex, chain: Chain, numbers: Numbers) -> str:
    low, high = read_clip_levels(index, chain, numbers) or (0, 0)
    return f"the levels {low} to {high}"


def _find_gone(names: set[str], pairs: Iterable[PairInfo], notes: Notes) -> Iterator[Disagreement]:
    """Notes of nodes that the file does not have; of a plan, one for each site without a pair."""
    sites = {str(pair.site) for pair in pairs}
    for name, record in notes.by_node.items():
        if name not in names:
            bits = read_noted_bits(record)
            yield Disagreement(site=name, noted=f"model metadata {bits}", found="no such node", why="its node is gone")
    for site in notes.sites:
        nodes = {site.dequantize, *list_specs((site,))}
        if str(site.site) not in sites and not nodes & names:
            why = "the plan's site has no pair"
            yield Disagreement(site=str(site.site), noted=f"plan {site.spec.bits}", found="no such node", why=why)
