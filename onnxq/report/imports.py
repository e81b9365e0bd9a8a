"""Imported scales and parts of a calibration, as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import PurePath

from rich.console import RenderableType

from onnxq.calibrate.parts import Part
from onnxq.interop import Imported, MatchedSite, MissingSite, UnmatchedKind, UnusedLine
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.model import Report
from onnxq.report.terminal import View, format_scale, format_warning, join_lines, make_sheet, make_table, show_result

# Names of a list without `verbose`.
_SHOWN = 4
# Labels of the reasons for unused lines, in the order of the sheet.
_WHY = {
    UnmatchedKind.FOLDED: "fused away",
    UnmatchedKind.TENSORRT: "TensorRT's own layers",
    UnmatchedKind.UNKNOWN: "not in the model",
}


def import_json(found: Imported, applied: Report | None = None) -> str:
    """Convert the import to one strict JSON document, without the plan, which has its own file."""
    values = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "plan"}
    counts = {"target": found.plan.target, "sites": len(found.plan.sites)}
    plan = {"refusals": found.plan.refusals, "left_float": found.plan.left_float}
    return to_json({"schema": SCHEMA, **values, **counts, **plan, "applied": applied})


def show_import(found: Imported, view: View = View(), *, applied: Report | None = None) -> None:
    """Print the import; verbose: every line of the cache and every site. applied: of the plan, for the JSON."""
    notes = [format_warning(note) for note in (*found.notes, *found.plan.warnings)]
    show_result(view, lambda: import_json(found, applied), _make_parts(found, view.verbose), notes)


def _make_parts(found: Imported, verbose: bool) -> Iterator[RenderableType]:
    yield Text(f"{PurePath(found.cache).name}  ({found.header})", style="bold")
    if verbose and found.matched:
        columns = ("site", "scale", "line", "name in the cache", "through")
        names = ("site", "name in the cache")
        rows = map(_make_match, found.matched)
        yield make_table(columns, rows, right=columns[1:3], names=names, fold=("through",))
        yield Text("")
    yield make_sheet(_make_rows(found, verbose))


def _make_rows(found: Imported, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    used = len({one.line for one in found.matched})
    yield "cache", Text(f"{found.entries} scales, {used} of them used")
    counts = ", ".join(f"{count} {role}" for role, count in sorted(found.plan.by_role().items()))
    yield "plan", Text(f"{len(found.plan.sites)} sites for {found.plan.target}" + (f": {counts}" if counts else ""))
    if found.missing:
        yield "no scale", join_lines([_describe_absent(one) for one in found.missing], verbose, _SHOWN)
    for why, label in _WHY.items():
        names = [_describe_left(one, verbose) for one in found.unmatched if one.why is why]
        if names:
            yield label, Text(f"{len(names)}: ").append_text(join_lines(names, verbose, _SHOWN))
    if found.unused:
        yield "not used", Text(*_group_reasons(found.unused, verbose))


def _make_match(one: MatchedSite) -> tuple[str, ...]:
    # Most names are the site's own; only others are worth a cell.
    name = one.name if one.name != one.site else ""
    return one.site, format_scale(one.scale, one.scale), str(one.line), name, one.through


def _describe_absent(one: MissingSite) -> str:
    return f"{one.tensor}: {one.done}" if one.done else one.tensor


def _describe_left(one: UnusedLine, verbose: bool) -> str:
    text = f"{one.name} (line {one.line})"
    if one.nearest:
        return f"{text}, nearest {' or '.join(one.nearest)}"
    return f"{text}: {one.reason}" if verbose else text


def _group_reasons(left: Sequence[UnusedLine], verbose: bool) -> list[str]:
    """Count lines by reason; with `verbose` also name them."""
    groups: dict[str, list[str]] = {}
    for one in left:
        groups.setdefault(one.reason, []).append(one.name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return [f"{len(names)} {reason}" + (f": {', '.join(names)}" if verbose else "") for reason, names in ordered]


def show_part(part: Part, output: str, view: View = View()) -> None:
    """Print how many of the samples a part holds, and which are still missing."""
    missing = f"; {len(part.missing)} are in other parts" if part.missing else ": it is whole"
    written = f"{output}: " if output else ""
    text = f"{written}{len(part.wants)} ranges over {len(part.samples)} of {part.total} samples{missing}"
    show_result(view, lambda: part_json(part, output), [Text(text)], [])


def part_json(part: Part, output: str) -> str:
    """Convert the facts of a part, without its numbers, to one JSON document."""
    facts = {"output": output, "ranges": len(part.wants), "total": part.total, "samples": sorted(part.samples)}
    return to_json({"schema": SCHEMA, "error": None, "part": facts, "missing": part.missing, "keys": part.keys})
