"""The cost of sites, as tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import PurePath

from rich.console import Group, RenderableType

from onnxq.evaluation.profile import KINDS, GroupCost, Profile
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.model import warn_synthetic
from onnxq.report.terminal import (
    View,
    format_decibel,
    format_warning,
    list_choices,
    make_sheet,
    make_table,
    select_rows,
    show_result,
)

# Rows of a table without `verbose`.
_SHOWN = 12
_TITLES = {"node": "nodes, each with all it reads", "segment": "segments of neighbouring nodes", "site": "sites"}


def profile_json(found: Profile) -> str:
    """Convert the profile to one strict JSON document."""
    return to_json({"schema": SCHEMA, **{field.name: getattr(found, field.name) for field in fields(found)}})


def show_profile(found: Profile, view: View = View()) -> None:
    """Print the costs, worst first."""
    show_result(view, lambda: profile_json(found), _make_parts(found, view), _make_warnings(found))


def _make_parts(found: Profile, view: View) -> Iterator[RenderableType]:
    yield _make_title(found)
    yield make_sheet(_make_rows(found))
    for kind in KINDS:
        costs = found.of(kind)
        if costs:
            yield from (Text(""), Text(_TITLES[kind], style="bold"), *_make_costs(costs, view))
    if found.prefixes:
        shown, more = select_rows(found.prefixes, view)
        steps = ((step.node, format_decibel(step.sqnr_db)) for step in shown)
        yield from (Text(""), Text("prefixes: quantized from the start up to a node", style="bold"))
        yield from (make_table(("node", "SQNR"), steps, right=("SQNR",), names=("node",)), *_make_more(more))


def _make_title(found: Profile) -> Text:
    text = Text(PurePath(found.source).name or "model", style="bold")
    return text.join_text(f"  ({found.quantized})" if found.quantized else "", style="dim")


def _make_rows(found: Profile) -> Iterator[tuple[str, RenderableType]]:
    count = f"{found.samples} sample{'' if found.samples == 1 else 's'}"
    yield "all", Text(f"{format_decibel(found.sqnr_db)} with everything quantized, {count}")
    if found.data:
        yield "data", Text(found.data)
    if len(found.outputs) > 1:
        yield (
            "outputs",
            make_table(
                ("output", "SQNR"),
                ((o.name + o.part, format_decibel(o.sqnr_db)) for o in found.outputs),
                right=("SQNR",),
                names=("output",),
            ),
        )
    if found.choices:
        yield "choices", Group(*list_choices(found.choices))
    yield (
        "read",
        Text("isolated: only it is quantized; left out: all but it; gain: what leaving it float would bring back"),
    )


def _make_more(line: str) -> tuple[RenderableType, ...]:
    return (Text(line, style="dim"),) if line else ()


def _make_costs(costs: Sequence[GroupCost], view: View) -> tuple[RenderableType, ...]:
    columns = ("name", "op", "pairs", "isolated", "left out", "gain")
    shown, more = select_rows(costs, view, _SHOWN)
    # A segment may hold many operators: three of them are enough to recognise it.
    rows = [
        (c.name, "/".join(c.ops[:3]) + ("/…" if len(c.ops) > 3 else ""), str(len(c.sites)),
         format_decibel(c.isolated_db), format_decibel(c.leave_one_out_db),
         "n/a" if math.isnan(c.gain_db) else f"{c.gain_db:+.2f} dB")
        for c in shown
    ]  # fmt: skip
    return make_table(columns, rows, right=columns[2:], names=("name",)), *_make_more(more)


def _make_warnings(found: Profile) -> Iterator[RenderableType]:
    for line in found.warnings:
        yield format_warning(line)
    if found.synthetic:
        yield format_warning(warn_synthetic("costs were measured"))
