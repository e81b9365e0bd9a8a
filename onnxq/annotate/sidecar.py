"""Notes of bits beside a model, and notes found again after a tool dropped or renamed nodes.

A note belongs to the pair that has a node of its name; else to the one whose tensor has the name of its site; else to
the one whose result is made by the same operators and read by the same ones. `Origin` says which.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto

from onnxq.annotate.bits import (
    NO_NOTES,
    Origin,
    PairInfo,
    PairInfos,
    Record,
    Records,
    parse_records,
    read_noted_bits,
    read_notes,
)
from onnxq.annotate.find import find_chains, find_site
from onnxq.annotate.read import describe_pair, find_pairs
from onnxq.annotate.write import find_contradiction, make_record, warn_of_sites
from onnxq.errors import PlanError, dump_json
from onnxq.files import AnyPath, read_text
from onnxq.graph import GraphIndex, compute_structural_ids, read_integer_products
from onnxq.sites import Cautions

_FIX = "write one with `onnxq annotate-bits` from a model"


def write_sidecar(proto: ModelProto, pairs: Iterable[PairInfo]) -> str:
    """The notes of the pairs of a model as JSON, to stand beside it. proto: the model that they were found in."""
    index = GraphIndex(read_integer_products(proto))
    ids = compute_structural_ids(index)
    results = {node.name: ids.get(node.result, "") for node in index.nodes}
    records = {
        name: {**make_record(pair), "structure": results.get(pair.nodes[-1], "")}
        for pair in pairs
        for name in pair.nodes
    }
    return dump_json(records)


def read_sidecar(path: AnyPath) -> Records:
    """The notes of a file that `write_sidecar` made. Raises PlanError for another one."""
    text = read_text(path, PlanError, _FIX, code="Q411")
    try:
        records = parse_records(text)
    except PlanError as error:
        raise PlanError(Path(path), error.cause, _FIX, code="Q411") from error
    if not any(map(read_noted_bits, records.values())):
        raise PlanError(Path(path), "holds no note of bits", _FIX, code="Q411")
    return records


def place_notes(proto: ModelProto, beside: Records | None) -> tuple[PairInfos, Cautions]:
    """The pairs of a model with the bits of notes, and a warning of those that found no pair.

    beside: of a sidecar; None for the model's own, of which those of nodes that are gone find their pair anew.
    """
    index = GraphIndex(read_integer_products(proto))
    notes = read_notes(proto)
    loose = beside or {
        name: record for name, record in notes.by_node.items() if name not in index.named
    }
    kept = {
        record.get("site")
        for name, record in notes.by_node.items()
        if beside is None and name in index.named
    }
    by_site = _group_records(loose, "site")
    by_structure = _group_records(loose, "structure")
    ids = compute_structural_ids(index) if by_structure else {}
    records = dict(notes.by_node)
    origins = {}
    for chain in find_chains(index) if loose else ():
        # It has its note already, by its node.
        if beside is None and notes.find_record(chain):
            continue
        # An edge is the site where other readers of the tensor have a pair of another kind, or none.
        result = chain.last.result
        sites = (find_site(index, chain, None), *index.list_consumers(result))
        # In the order in which they are trusted.
        ways = {
            Origin.NAME: next((loose[name] for name in chain.names if name in loose), None),
            Origin.TENSOR: next(filter(None, map(by_site.get, map(str, sites))), None),
            Origin.STRUCTURE: by_structure.get(ids.get(result, "")),
        }
        origin, record = next(
            ((origin, note) for origin, note in ways.items() if note), (Origin.NAME, {})
        )
        bits = read_noted_bits(record)
        if bits is not None and not find_contradiction(describe_pair(index, chain, NO_NOTES), bits):
            name = chain.last.name
            kept.add(record.get("site"))
            origins[name] = origin
            # A tensor that was found by structure has another name now than its note says.
            records[name] = {**record, "site": ""} if origin is Origin.STRUCTURE else record
    pairs = find_pairs(proto, replace(notes, by_node=records))
    found = tuple(
        replace(pair, origin=origins.get("".join(pair.nodes[-1:]), pair.origin)) for pair in pairs
    )
    lost = {
        str(record.get("site", name)): record
        for name, record in loose.items()
        if record.get("site") not in kept
    }
    return found, warn_of_sites(
        "notes without a pair that they fit, left out",
        [f"{site} ({record.get('bits')} bits)" for site, record in lost.items()],
    )


def _group_records(records: Records, key: str) -> Records:
    """The records by one of their fields; an empty one where several have the same and name different bits."""
    grouped: dict[str, Record] = {}
    for record in records.values():
        text = record.get(key, "")
        if read_noted_bits(grouped.setdefault(text, record)) != read_noted_bits(record):
            grouped[text] = {}
    grouped.pop("", None)
    return grouped
