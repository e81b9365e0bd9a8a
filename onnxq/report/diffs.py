"""The comparison of engines on a quantized model, as tables and JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import IO, Any

from rich.console import Group, RenderableType
from rich.text import Text

from onnxq.engines.diff_model import FLOAT, OFF, Difference, Error, LayerDiff, Parting, run_label
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.sums import saturation_cause
from onnxq.report.synthetic import warn_synthetic
from onnxq.report.terminal import decibel, first_rows, sheet, show, table, warning_text, write
from onnxq.sites import Caution
from onnxq.wording import phrase

# Layers in the summary without `verbose`.
_WORST = 5


def difference_json(found: Difference, error: Mapping[str, Any] | None = None) -> str:
    """Convert the comparison to one strict JSON document."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return to_json(
        {
            "schema": SCHEMA,
            "error": error,
            "holds": found.holds,
            **values,
            "messages": [str(one) for one in found.unmet],
        }
    )


def show_difference(
    found: Difference,
    *,
    as_json: bool = False,
    verbose: bool = False,
    top: int | None = None,
    quiet: bool = False,
    error: Mapping[str, Any] | None = None,
    stream: IO[str] | None = None,
    errors: IO[str] | None = None,
    width: int | None = None,
) -> None:
    """Print the comparison to `stream` (stdout) as tables or JSON; with JSON the warnings go to `errors` (stderr).

    top: number of layers to list, those with the largest loss. quiet: only the warnings, to `errors`.
    """
    warnings = list(_make_warnings(found))
    if as_json:
        write(difference_json(found, error), stream)
    if as_json or quiet:
        if warnings:
            show(Group(*warnings), sys.stderr if errors is None else errors, width)
        return
    parts: list[RenderableType] = [_make_title(found), sheet(_make_rows(found, verbose, top))]
    if found.layers:
        parts += [Text(""), *_make_layers(found, verbose, top)]
    show(Group(*parts, *warnings), stream, width)


def _make_title(found: Difference) -> Text:
    names = [PurePath(path).name or "model" for path in (found.float_model, found.quantized_model)]
    return Text(f"{names[1]} against {names[0]}", style="bold").append(f"  ({found.data})" if found.data else "")


def _make_rows(found: Difference, verbose: bool, top: int | None) -> Iterator[tuple[str, RenderableType]]:
    yield "runs", _make_runs(found)
    if found.outputs:
        yield "outputs", _make_outputs(found)
    yield "engines", Text(_describe_engines(found))
    for piece in found.bisections:
        names = ", ".join(f"{name} ({op})" for name, op in zip(piece.nodes, piece.ops, strict=True))
        what = f"part by themselves at {piece.output} ({_describe_gap(piece.sqnr_db, piece.levels)})"
        if piece.failure:
            what = f"cannot run by themselves ({piece.failure})"
        text = f"{run_label(piece.run)}: {len(piece.nodes)} nodes {what}: {names}"
        yield "bisected", Text(text + (f"\nwritten to {piece.path}" if piece.path else ""))
    if found.worst:
        by_name = {layer.name: layer for layer in found.layers}
        worst = [by_name[name] for name in found.worst if name in by_name]
        if worst:
            # Worst first, as `found.worst` lists them.
            shown, more = first_rows(worst, top, None if verbose else _WORST)
            lines = [f"{one.name} ({one.op}): -{one.drop_db:.1f} dB" for one in shown]
            yield "worst", Text("\n".join([*lines, *filter(None, [more])]))
    if found.skipped:
        reasons = (
            f"[{s.code}] {run_label(s.subject)}: {s.reason}" + (f"\n    fix: {phrase(s.fix)}" if s.fix else "")
            for s in found.skipped
        )
        yield "not run", Text("\n".join(reasons))
    if found.notes:
        yield "notes", Text("\n".join(found.notes))
    if found.saved:
        yield "saved", Text("\n".join(found.saved))


def _make_runs(found: Difference) -> RenderableType:
    rows = ((run_label(run.name), run.engine, str(run.samples)) for run in found.runs)
    return table(("run", "engine", "samples"), rows, right=("samples",), fold=("run", "engine"))


def _make_outputs(found: Difference) -> RenderableType:
    best = f"top-{found.top_k}"
    columns = ("output", "run", "SQNR", "cosine", "max abs", "max rel", best, f"against {run_label(OFF)}")
    rows = []
    for output in found.outputs:
        against = {error.run: error for error in output.engines}
        for error in output.accuracy:
            other = against.get(error.run)
            rows.append(
                (output.name, run_label(error.run), *_format_numbers(error), decibel(other.sqnr_db) if other else "")
            )
    return table(columns, rows, right=columns[2:], names=("output",), fold=("run",))


def _format_numbers(error: Error) -> tuple[str, str, str, str, str]:
    return (
        decibel(error.sqnr_db),
        f"{error.cosine:.5f}",
        f"{error.max_abs:.3g}",
        f"{error.max_rel:.3g}",
        "" if math.isnan(error.top_k) else f"{100 * error.top_k:.1f}%",
    )


def _describe_engines(found: Difference) -> str:
    runs = [run.name for run in found.runs]
    if found.parted:
        return "\n".join(
            f"{run_label(part.run)}: parts from what the file says first at {part.tensor} ({part.op} {part.node}): "
            f"{_describe_gap(part.sqnr_db, part.levels)}{_describe_cause(part)}"
            for part in found.parted
        )
    compared = {error.run for output in found.outputs for error in output.engines}
    if not compared:
        names = ", ".join(run_label(run) for run in runs if run != FLOAT)
        return f"only one engine ran ({names}): nothing to compare it with"
    return "all agree within rounding"


def _describe_cause(part: Parting) -> str:
    cause = saturation_cause(part.saturating)
    return f"; {cause}" if cause else ""


def _describe_gap(sqnr_db: float, levels: float) -> str:
    return decibel(sqnr_db) + ("" if math.isnan(levels) else f", up to {levels:.0f} levels")


def _make_layers(found: Difference, verbose: bool, top: int | None) -> Iterator[RenderableType]:
    layers, more = _choose_layers(found, top)
    runs = list(dict.fromkeys(error.run for layer in found.layers for error in layer.accuracy))
    others = list(dict.fromkeys(error.run for layer in found.layers for error in layer.engines))
    columns: tuple[str, ...] = ("tensor", "op", *(f"SQNR {run_label(run)}" for run in runs), "drop")
    columns += (*(f"{run_label(run)} against {run_label(OFF)}" for run in others), "levels")
    if verbose:
        columns += ("cosine", "max abs", "max rel", "read at")
    rows = (_make_layer(layer, runs, others, verbose) for layer in layers)
    right = [c for c in columns if c not in ("tensor", "op", "read at")]
    yield table(columns, rows, right=right, names=("tensor", "read at"))
    if more:
        yield Text(more, style="dim")


def _choose_layers(found: Difference, top: int | None) -> tuple[Sequence[LayerDiff], str]:
    """Choose the layers to list, in the order of the network; return them and a line that counts the others."""
    order = {name: k for k, name in enumerate(found.worst)}
    ranked = sorted(found.layers, key=lambda layer: order.get(layer.name, len(order)))
    shown, more = first_rows(ranked, top)
    chosen = {layer.name for layer in shown}
    return [layer for layer in found.layers if layer.name in chosen], more


def _make_layer(layer: LayerDiff, runs: Sequence[str], others: Sequence[str], verbose: bool) -> tuple[str, ...]:
    accuracy = {error.run: error for error in layer.accuracy}
    engines = {error.run: error for error in layer.engines}
    levels = max((error.levels for error in layer.engines if not math.isnan(error.levels)), default=math.nan)
    cells = [layer.name, layer.op]
    cells += [decibel(accuracy[run].sqnr_db) if run in accuracy else "" for run in runs]
    cells.append("" if math.isnan(layer.drop_db) else f"{layer.drop_db:.1f}")
    cells += [decibel(engines[run].sqnr_db) if run in engines else "" for run in others]
    cells.append("" if math.isnan(levels) else f"{levels:.1f}")
    if verbose:
        worst = min(layer.accuracy, key=lambda error: error.sqnr_db, default=None)
        cells += list(_format_numbers(worst)[1:4]) if worst is not None else ["", "", ""]
        cells.append(layer.at)
    return tuple(cells)


def _make_warnings(found: Difference) -> Iterator[RenderableType]:
    for part in found.parted:
        text = (
            f"{run_label(part.run)}: something else than the file says is computed from {part.tensor} on "
            f"({_describe_gap(part.sqnr_db, part.levels)}){_describe_cause(part)}"
        )
        yield warning_text(Caution("W109", text), "bold red")
    for one in found.unmet:
        yield Text(f"unmet: output {one.output}: {one}", style="bold red")
    if found.synthetic:
        yield warning_text(warn_synthetic("the models were compared"))
