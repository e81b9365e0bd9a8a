"""Two proofs compared by the names of nodes and sites, which stay when kernels are fused and named otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxq.annotate import WeightSums
from onnxq.config.schema import JsonText, Loose, Natural
from onnxq.engines.prove.proof import Change, Proof
from onnxq.errors import DataError
from onnxq.files import AnyPath, read_text
from onnxq.sites import JsonObject, drop_repeats

# The JSON of a proof has some 1000 bytes for a node.
_MOST_BYTES = 2**29


class _BuildRow(Loose):
    engine: str = ""
    version: str = ""
    capability: str = ""
    state: str = ""


class _NodeRow(Loose):
    type: str


class _SiteRow(Loose):
    state: str


class _WeightRow(Loose):
    weight: str
    exact: str = ""
    rows: Natural = 0
    all_rows: Natural = 0


class ProofFile(Loose):
    """The parts of a proof's JSON that a later proof is compared with."""

    build: _BuildRow
    nodes: dict[str, _NodeRow]
    sites: dict[str, _SiteRow]
    kernels: tuple[JsonObject, ...] = ()
    weights: tuple[_WeightRow, ...] | None = None


_FIX = "write it with `onnxq prove`, as JSON"


def read_proof(path: AnyPath) -> ProofFile:
    """The proof in a JSON file that `onnxq prove` wrote. Raises DataError with line and path for any other file."""
    text = JsonText(str(path), read_text(path, DataError, _FIX, limit=_MOST_BYTES, code="Q217"))
    raw = text.parse(DataError, _FIX, code="Q217")
    if not isinstance(raw, dict) or not all(
        isinstance(raw.get(key), dict) for key in ("build", "nodes", "sites")
    ):
        raise DataError(path, "is not the JSON of a proof", _FIX, code="Q217")
    return text.read(ProofFile, DataError, _FIX, code="Q217")


def find_changes(before: ProofFile, after: Proof) -> Iterator[Change]:
    """The differences: engine and state, numbers of kernels, then nodes, weights and sites in the model's order."""
    facts = dict(before.build)
    yield from _compare_named(
        "build", facts, {key: str(getattr(after.build, key)) for key in facts}
    )
    counts = ({"kernels": str(len(proof.kernels))} for proof in (before, after))
    yield from _compare_named("count", *counts)
    types = {name: one.type for name, one in before.nodes.items()}
    yield from _compare_named("node", types, {one.node: one.type for one in after.nodes})
    if before.weights is not None:
        rows = {one.weight: _describe_rows(one) for one in before.weights}
        yield from _compare_named(
            "weight", rows, {one.weight: _describe_rows(one) for one in after.weights}
        )
    states = {name: one.state for name, one in before.sites.items()}
    yield from _compare_named("site", states, {one.site: str(one.state) for one in after.sites})


def _describe_rows(weight: _WeightRow | WeightSums) -> str:
    return f"{0 if weight.exact else weight.rows} of {weight.all_rows} rows can overflow"


def _compare_named(
    kind: str, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[Change]:
    for name in drop_repeats((*after, *before)):
        was = before.get(name, "")
        now = after.get(name, "")
        if was != now:
            yield Change(kind=kind, name=name, before=was, after=now)
