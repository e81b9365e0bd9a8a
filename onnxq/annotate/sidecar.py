"""Notes of bits beside a model, and notes found again after a tool dropped or renamed nodes.

A note belongs to the pair that has a node of its name; else to the one whose tensor has the name of its site; else to
the one whose result is made of the same operators and read by the same ones, if there is but one. `Origin` says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxq.annotate.bits import Notes, Origin, PairInfo, read_notes
from onnxq.annotate.find import Chain, find_chains, find_site
from onnxq.annotate.read import describe_pair, find_pairs
from onnxq.annotate.write import find_contradiction, make_record
from onnxq.config.rows import read_fields, write_fields
from onnxq.config.schema import JsonText, SchemaNumber, Width
from onnxq.config.values import Frozen
from onnxq.errors import PlanError, dump_json
from onnxq.files import read_text
from onnxq.graph import GraphIndex, compute_structural_ids
from onnxq.graph.integer_products import read_integer_products
from onnxq.sites import Caution, Cautions, Names

SCHEMA = 1
_FIX = "write one with `onnxq annotate-bits --sidecar`"


@dataclass(frozen=True, kw_only=True)
class PairNote:
    """The note of one pair, with all that it can be found by."""

    nodes: Names
    site: str
    bits: Width
    scheme: str = ""
    granularity: str = ""
    role: str = ""
    # As `compute_structural_ids` names the dequantized tensor; "" where that is not known.
    structure: str = ""


@dataclass(frozen=True)
class Sidecar:
    """The file beside a model."""

    pairs: tuple[PairNote, ...]


class _SidecarFile(Frozen):
    version: SchemaNumber


def write_sidecar(proto: ModelProto, pairs: Iterable[PairInfo]) -> str:
    """The notes of the pairs of a model as JSON, to stand beside it. proto: the model that they were found in."""
    index = GraphIndex(read_integer_products(proto))
    ids = compute_structural_ids(index)
    results = {node.name: ids.get(node.result, "") for node in index.nodes}
    notes = [
        PairNote(nodes=pair.nodes, structure=results.get(pair.nodes[-1], ""), **make_record(pair))
        for pair in pairs
        if pair.nodes
    ]
    return dump_json({"schema": SCHEMA, **write_fields(Sidecar(tuple(notes)))})


def read_sidecar(path: str | Path) -> tuple[PairNote, ...]:
    """The notes of a file that `write_sidecar` made. Raises PlanError for another one."""
    text = JsonText(str(path), read_text(path, PlanError, _FIX, code="Q411"))
    raw = text.parse(PlanError, _FIX, code="Q411")
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise PlanError(Path(path), f"holds no notes of bits in schema {SCHEMA}", _FIX, code="Q411")
    return read_fields(text, Sidecar, PlanError, _FIX, code="Q411", base=_SidecarFile).pairs


def place_notes(proto: ModelProto, beside: Sequence[PairNote] | None) -> tuple[tuple[PairInfo, ...], Cautions]:
    """The pairs of a model with the bits of notes, and a warning of those that found no pair.

    beside: of a sidecar; None for the model's own, of which those that name nodes that are gone find their pair anew.
    """
    index, notes = GraphIndex(read_integer_products(proto)), read_notes(proto)
    chains = list(find_chains(index))
    loose = _list_loose(index, notes) if beside is None else beside
    if not loose:
        return find_pairs(proto), ()
    free = [chain for chain in chains if beside is not None or not notes.find_record(chain)]
    placed = _match_notes(index, free, loose)
    records, pairs, used = dict(notes.by_node), [], set()
    for chain, (note, origin) in placed.items():
        if not find_contradiction(describe_pair(index, chain, replace(notes, by_node={}, own={}, plan={})), note.bits):
            used.add(note)
            # A tensor that was found by structure has another name now, which its own note no longer knows.
            hidden = {"nodes", "structure", *(("site",) if origin is Origin.STRUCTURE else ())}
            records[chain.last.name] = {key: value for key, value in asdict(note).items() if key not in hidden}
    notes = replace(notes, by_node=records)
    for chain, pair in zip(chains, find_pairs(proto, notes), strict=True):
        own = placed.get(chain)
        pairs.append(replace(pair, origin=own[1]) if own is not None and own[0] in used else pair)
    return tuple(pairs), _warn_lost([note for note in loose if note not in used])


def _list_loose(index: GraphIndex, notes: Notes) -> list[PairNote]:
    """The model's own notes of which every node is gone, one for each site."""
    names, by_site = {node.name for node in index.nodes}, dict[str, dict[str, Any]]()
    for name, record in notes.by_node.items():
        site = str(record.get("site", name))
        known = by_site.setdefault(site, {"site": site, "nodes": (), **_pick(record)})
        known["nodes"] = (*known["nodes"], name)
    whole = [PairNote(**note) for note in by_site.values() if "bits" in note]
    return [note for note in whole if not names.intersection(note.nodes)]


def _pick(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key in ("scheme", "granularity", "role")}
    text = str(record.get("bits", ""))
    return kept | ({"bits": int(text)} if text.isdecimal() and len(text) <= 2 else {})


def _match_notes(
    index: GraphIndex, chains: Iterable[Chain], notes: Sequence[PairNote]
) -> dict[Chain, tuple[PairNote, Origin]]:
    """The note of each chain, and what it was found by. Of several that fit, none does unless all say the same bits."""
    by_name = {name: [note] for note in notes for name in note.nodes}
    by_site, by_structure = dict[str, list[PairNote]](), dict[str, list[PairNote]]()
    for note in notes:
        by_site.setdefault(note.site, []).append(note)
        by_structure.setdefault(note.structure, []).append(note)
    by_structure.pop("", None)
    ids = compute_structural_ids(index) if by_structure else {}
    left, placed = list(chains), dict[Chain, tuple[PairNote, Origin]]()
    # All names first: a note that has its node is nobody else's.
    for origin in (Origin.NAME, Origin.TENSOR, Origin.STRUCTURE):
        taken = {id(note) for note, _ in placed.values()}
        for chain in list(left):
            if origin is Origin.NAME:
                fitting = next((by_name[node.name] for node in reversed(chain.nodes) if node.name in by_name), [])
            elif origin is Origin.TENSOR:
                fitting = by_site.get(str(find_site(index, chain, None)), [])
            else:
                fitting = by_structure.get(ids.get(chain.last.result, ""), [])
            fitting = [note for note in fitting if origin is Origin.NAME or id(note) not in taken]
            if len({note.bits for note in fitting}) == 1:
                placed[chain] = fitting[0], origin
                left.remove(chain)
    return placed


def _warn_lost(lost: Sequence[PairNote]) -> Cautions:
    if not lost:
        return ()
    names = ", ".join(f"{note.site} ({note.bits} bits)" for note in lost[:3]) + (" …" if len(lost) > 3 else "")
    return (Caution("W106", f"notes without a pair that they fit, left out ({len(lost)}): {names}"),)
