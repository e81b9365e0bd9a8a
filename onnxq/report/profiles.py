"""What sites cost, as tables and JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import IO

from rich.console import Group, RenderableType
from rich.text import Text

from onnxq.profile import KINDS, GroupCost, Profile
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.terminal import decibel, first_rows, sheet, show, table, warning_text, write
from onnxq.sites import Caution

_SHOWN = 12
_TITLES = {"node": "nodes, each with all it reads", "stretch": "stretches of neighbouring nodes", "site": "sites"}
SYNTHETIC = Caution(
    "W101", "no samples were given: costs were measured on made-up inputs, so give `data=…` for numbers that count"
)


def profile_json(found: Profile) -> str:
    """The profile as one strict JSON document."""
    return to_json({"schema": SCHEMA, **{field.name: getattr(found, field.name) for field in fields(found)}})


def show_profile(
    found: Profile,
    *,
    as_json: bool = False,
    verbose: bool = False,
    top: int | None = None,
    quiet: bool = False,
    stream: IO[str] | None = None,
    errors: IO[str] | None = None,
    width: int | None = None,
) -> None:
    """Print to `stream` (stdout) as tables, worst first, or as JSON; with JSON warnings go to `errors` (stderr).

    top: rows of each table. quiet: only the warnings, to `errors`.
    """
    warnings = list(_warnings(found))
    if as_json:
        write(profile_json(found), stream)
    if as_json or quiet:
        if warnings:
            show(Group(*warnings), sys.stderr if errors is None else errors, width)
        return
    parts: list[RenderableType] = [_title(found), sheet(_rows(found))]
    for kind in KINDS:
        costs = found.of(kind)
        if costs:
            parts += [Text(""), Text(_TITLES[kind], style="bold"), *_costs(costs, verbose, top)]
    if found.reach:
        reached, more = first_rows(found.reach, top)
        steps = ((step.node, decibel(step.sqnr_db)) for step in reached)
        parts += [Text(""), Text("reach: quantized from the start up to a node", style="bold")]
        parts += [table(("node", "SQNR"), steps, right=("SQNR",), names=("node",)), *_more(more)]
    show(Group(*parts, *warnings), stream, width)


def _title(found: Profile) -> Text:
    text = Text(PurePath(found.source).name or "model", style="bold")
    return text.append(f"  ({found.quantized})" if found.quantized else "", style="dim")


def _rows(found: Profile) -> Iterator[tuple[str, RenderableType]]:
    count = f"{found.samples} sample{'' if found.samples == 1 else 's'}"
    yield "all", Text(f"{decibel(found.sqnr_db)} with everything quantized, {count}")
    if found.data:
        yield "data", Text(found.data)
    if len(found.outputs) > 1:
        yield (
            "outputs",
            table(
                ("output", "SQNR"),
                ((o.name, decibel(o.sqnr_db)) for o in found.outputs),
                right=("SQNR",),
                names=("output",),
            ),
        )
    yield "read", Text("alone: only it is quantized; without: all but it; gain: what leaving it float would bring back")


def _more(line: str) -> tuple[RenderableType, ...]:
    return (Text(line, style="dim"),) if line else ()


def _costs(costs: Sequence[GroupCost], verbose: bool, top: int | None) -> tuple[RenderableType, ...]:
    columns = ("name", "op", "pairs", "alone", "without", "gain")
    shown, more = first_rows(costs, top, None if verbose else _SHOWN)
    rows = [
        (c.name, "/".join(c.ops[:3]) + ("/…" if len(c.ops) > 3 else ""), str(len(c.sites)), decibel(c.alone_db),
         decibel(c.without_db), "n/a" if math.isnan(c.gain_db) else f"{c.gain_db:+.2f} dB")
        for c in shown
    ]  # fmt: skip
    return table(columns, rows, right=columns[2:], names=("name",)), *_more(more)


def _warnings(found: Profile) -> Iterator[RenderableType]:
    for line in found.warnings:
        yield warning_text(line)
    if found.synthetic:
        yield warning_text(SYNTHETIC)
