"""Two proofs compared by the names of nodes and sites, which stay when kernels are fused and named otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxq.engines.proof import Change, Proof
from onnxq.errors import DataError


def read_proof(path: str | Path) -> dict[str, Any]:
    """A proof that `onnxq prove` wrote as JSON. Raises DataError when it is none."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            path, error.strerror or str(error), "write it with `onnxq prove`, as JSON", code="Q217"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(path, "is not JSON", "write it with `onnxq prove`, as JSON", code="Q217") from error
    if not isinstance(raw, dict) or not all(isinstance(raw.get(key), dict) for key in ("build", "nodes", "sites")):
        raise DataError(path, "is not the JSON of a proof", "write it with `onnxq prove`, as JSON", code="Q217")
    return raw


def changes(before: Mapping[str, Any], after: Proof) -> Iterator[Change]:
    """What differs: the engine and its state, numbers of kernels, then nodes and sites in the model's order."""
    build = before["build"]
    for key, now in (
        ("engine", after.build.engine),
        ("version", after.build.version),
        ("capability", after.build.capability),
        ("state", after.build.state),
    ):
        if str(build.get(key, "")) != now:
            yield Change(kind="build", name=key, before=str(build.get(key, "")), after=now)
    was, now_is = len(before.get("kernels", ())), len(after.kernels)
    if was != now_is:
        yield Change(kind="count", name="kernels", before=str(was), after=str(now_is))
    yield from _named("node", _field(before["nodes"], "type"), {one.node: one.type for one in after.nodes})
    if isinstance(before.get("weights"), list):
        rows = {str(one.get("weight", "")): _rows(one) for one in before["weights"] if isinstance(one, Mapping)}
        yield from _named("weight", rows, {one.weight: _rows(vars(one)) for one in after.weights})
    yield from _named("site", _field(before["sites"], "state"), {one.site: one.state for one in after.sites})


def _field(entries: Mapping[str, Any], key: str) -> dict[str, str]:
    return {name: str(entry.get(key, "")) for name, entry in entries.items() if isinstance(entry, Mapping)}


def _rows(weight: Mapping[str, Any]) -> str:
    """How many rows of a weight can overflow, in words."""
    count = 0 if weight.get("exact") else weight.get("rows", 0)
    return f"{count} of {weight.get('all_rows', 0)} rows can overflow"


def _named(kind: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys((*after, *before)):
        was, now = before.get(name, ""), after.get(name, "")
        if was != now:
            yield Change(kind=kind, name=name, before=was, after=now)
