"""The import of a calibration cache, as tables and JSON: the site of each scale."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import IO

from rich.console import Group, RenderableType
from rich.text import Text

from onnxq.interop import Imported, MatchedSite, MissingSite, UnmatchedKind, UnusedLine
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.model import Report
from onnxq.report.terminal import (
    MORE,
    format_scale,
    format_warning,
    make_sheet,
    make_table,
    print_renderable,
    write_stream,
)
from onnxq.wording import translate_text

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


def show_import(
    found: Imported,
    *,
    applied: Report | None = None,
    as_json: bool = False,
    verbose: bool = False,
    quiet: bool = False,
    stream: IO[str] | None = None,
    errors: IO[str] | None = None,
    width: int | None = None,
) -> None:
    """Print the import to `stream` (stdout). verbose: every line of the cache and every site.

    quiet: only the notes, to `errors` (stderr).
    """
    notes = [format_warning(note) for note in (*found.notes, *found.plan.warnings)]
    if as_json:
        write_stream(import_json(found, applied), stream)
        return
    if quiet:
        if notes:
            print_renderable(Group(*notes), sys.stderr if errors is None else errors, width)
        return
    parts: list[RenderableType] = [Text(f"{PurePath(found.cache).name}  ({found.header})", style="bold")]
    if verbose and found.matched:
        columns = ("site", "scale", "line", "name in the cache", "through")
        parts += [
            make_table(
                columns,
                map(_make_match, found.matched),
                right=columns[1:3],
                names=("site", "name in the cache"),
                fold=("through",),
            ),
            Text(""),
        ]
    parts.append(make_sheet(_make_rows(found, verbose)))
    print_renderable(Group(*parts, *notes), stream, width)


def _make_rows(found: Imported, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    used = len({one.line for one in found.matched})
    yield "cache", Text(f"{found.entries} scales, {used} of them used")
    counts = ", ".join(f"{count} {role}" for role, count in sorted(found.plan.by_role().items()))
    yield "plan", Text(f"{len(found.plan.sites)} sites for {found.plan.target}" + (f": {counts}" if counts else ""))
    if found.missing:
        yield "no scale", Text(_join_lines([_describe_absent(one) for one in found.missing], verbose))
    for why, label in _WHY.items():
        names = [_describe_left(one, verbose) for one in found.unmatched if one.why is why]
        if names:
            yield label, Text(f"{len(names)}: {_join_lines(names, verbose)}")
    if found.unused:
        yield "not used", Text(_group_reasons(found.unused, verbose))


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


def _join_lines(names: Sequence[str], verbose: bool) -> str:
    shown = names if verbose else names[:_SHOWN]
    more = f"\n… and {len(names) - len(shown)} more ({translate_text(MORE)})" if len(names) > len(shown) else ""
    return "\n".join(shown) + more


def _group_reasons(left: Sequence[UnusedLine], verbose: bool) -> str:
    """Count lines by reason; with `verbose` also name them."""
    groups: dict[str, list[str]] = {}
    for one in left:
        groups.setdefault(one.reason, []).append(one.name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return "\n".join(
        f"{len(names)} {reason}" + (f": {', '.join(names)}" if verbose else "") for reason, names in ordered
    )
