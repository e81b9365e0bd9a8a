"""Differences of models and engines, as tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType

from onnxq.engines.diff.model import (
    FLOAT,
    OFF,
    Difference,
    Divergence,
    Error,
    LayerDiff,
    Unmet,
    explain_absence,
    label_run,
)
from onnxq.errors import VerificationError
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, describe_verdict, to_json
from onnxq.report.model import RunFigure, make_verdict, warn_synthetic
from onnxq.report.sums import explain_saturation
from onnxq.report.terminal import (
    View,
    format_decibel,
    format_verdict,
    format_warning,
    list_choices,
    make_sheet,
    make_table,
    part_text,
    select_rows,
    show_result,
)
from onnxq.sites import Caution
from onnxq.wording import translate_text

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
            "verdict": describe_verdict(_list_figures(found)),
            **values,
            "messages": [describe_unmet(found, one) for one in found.unmet],
        }
    )


def describe_unmet(found: Difference, unmet: Unmet) -> str:
    """A tolerance that is not met: the run, the value and the bound."""
    bound = f"{'at most' if unmet.at_most else 'at least'} {unmet.wanted:g}"
    value = "nothing comparable" if math.isnan(unmet.value) else f"{unmet.value:.6g}"
    label = _label_runs(found).get(unmet.run, label_run(unmet.run))
    part = f" of {unmet.part}" if unmet.part else ""
    return f"{label}: {unmet.measure}{part} is {value}, {bound} is wanted"


def _label_runs(found: Difference) -> dict[str, str]:
    return {run.name: run.label for run in found.runs}


def show_difference(found: Difference, view: View = View(), *, error: Mapping[str, Any] | None = None) -> None:
    """Print the comparison; `top` layers are those with the largest loss. error: what the command fails with."""
    show_result(view, lambda: difference_json(found, error), _make_parts(found, view), _find_warnings(found))


def find_unmet_tolerance(found: Difference) -> VerificationError | None:
    """The error of the first tolerance that is not met, else of a required engine that did not run; None without."""
    if found.unmet:
        first, more = found.unmet[0], len(found.unmet) - 1
        rest = f"; and {more} more tolerance{'s' if more > 1 else ''} not met" if more else ""
        return VerificationError(f"output {first.output}", f"{describe_unmet(found, first)}{rest}", code="Q703")
    for name in found.missing:
        refusal = next(one for one in found.skipped if one.subject == name)
        return explain_absence(refusal)
    return None


def _make_parts(found: Difference, view: View) -> Iterator[RenderableType]:
    yield _make_title(found)
    yield make_sheet(_make_rows(found, view))
    if found.layers:
        yield Text("")
        yield from _make_layer_table(found, view)


def _make_title(found: Difference) -> Text:
    names = [PurePath(path).name or "model" for path in (found.float_model, found.quantized_model)]
    return Text(f"{names[1]} against {names[0]}", style="bold").join_text(f"  ({found.data})" if found.data else "")


def _list_figures(found: Difference) -> list[RunFigure]:
    """Every output of every run against float."""
    labels = _label_runs(found)
    return [
        RunFigure(
            output=output.name + error.part, run=labels[error.run], sqnr_db=error.sqnr_db, top_1=error.top_k,
            rows=error.rows if output.classes is not None and found.top_k == 1 else 0, classes=bool(output.classes),
        )
        for output in found.outputs
        for error in output.accuracy
    ]  # fmt: skip


def _make_rows(found: Difference, view: View) -> Iterator[tuple[str, RenderableType]]:
    synthetic = ["on made-up inputs, which are not the task's"] if found.synthetic else []
    grade, text = make_verdict(_list_figures(found), [one for run in found.choices.values() for one in run], synthetic)
    yield "verdict", format_verdict(grade.name, grade.style, text)
    yield "runs", _make_run_table(found)
    if found.outputs:
        yield "outputs", _make_output_table(found)
    for run, choices in found.choices.items():
        yield "choices", Group(Text(_label_runs(found).get(run, run)), *list_choices(choices))
    yield "engines", Text(*_describe_engines(found))
    for piece in found.bisections:
        names = ", ".join(f"{name} ({op})" for name, op in zip(piece.nodes, piece.ops, strict=True))
        verdict = f"diverge by themselves at {piece.output} ({_describe_error(piece.sqnr_db, piece.levels)})"
        if piece.failure:
            verdict = f"cannot run by themselves ({piece.failure})"
        text = f"{label_run(piece.run)}: {len(piece.nodes)} nodes {verdict}: {names}"
        yield "bisected", Text(text, *([f"written to {piece.path}"] if piece.path else ()))
    if found.worst:
        by_name = {layer.name: layer for layer in found.layers}
        worst = [by_name[name] for name in found.worst if name in by_name]
        if worst:
            # Worst first, as `found.worst` lists them.
            shown, more = select_rows(worst, view, _WORST)
            lines = [f"{one.name} ({one.op}): drops by {one.drop_db:.1f} dB" for one in shown]
            yield "worst", Text(*lines, *filter(None, [more]))
    if found.skipped:
        yield "not run", Text(*_list_skipped(found))
    if found.notes:
        yield "notes", Text(*found.notes)
    if found.saved:
        yield "saved", Text(*found.saved)


def _list_skipped(found: Difference) -> Iterator[str]:
    for skipped in found.skipped:
        yield f"[{skipped.code}] {label_run(skipped.subject)}: {skipped.reason}"
        if skipped.fix:
            yield f"    fix: {translate_text(skipped.fix)}"


def _make_run_table(found: Difference) -> RenderableType:
    rows = ((run.label, run.engine, str(run.samples)) for run in found.runs)
    return make_table(("run", "engine", "samples"), rows, right=("samples",), fold=("run", "engine"))


def _make_output_table(found: Difference) -> RenderableType:
    best = f"top-{found.top_k}"
    columns = ("output", "run", "SQNR", "cosine", "max abs", "max rel", best, f"against {label_run(OFF)}")
    labels, rows = _label_runs(found), []
    parts: dict[str, Text] = {}
    for output in found.outputs:
        against = {error.run: error for error in output.engines}
        for error in output.accuracy:
            other = against.get(error.run)
            name, against_off = output.name + error.part, format_decibel(other.sqnr_db) if other else ""
            rows.append((name, labels[error.run], *_format_error(error), against_off))
            if error.part:
                parts.setdefault(name, part_text(output.name, name, error.whole_db))
    return Group(make_table(columns, rows, right=columns[2:], names=("output",), fold=("run",)), *parts.values())


def _format_error(error: Error) -> tuple[str, str, str, str, str]:
    return (
        format_decibel(error.sqnr_db),
        f"{error.cosine:.5f}",
        f"{error.max_abs:.3g}",
        f"{error.max_rel:.3g}",
        "" if math.isnan(error.top_k) else f"{100 * error.top_k:.1f}%",
    )


def _describe_engines(found: Difference) -> list[str]:
    labels = _label_runs(found)
    if found.divergences:
        return [
            f"{labels[one.run]}: diverges from the file first at {one.tensor} ({one.op} {one.node}): {_describe(one)}"
            for one in found.divergences
        ]
    compared = {error.run for output in found.outputs for error in output.engines}
    if not compared:
        names = ", ".join(label for run, label in labels.items() if run != FLOAT)
        return [f"only one engine ran ({names}): nothing to compare it with"]
    return ["all agree within rounding"]


def _describe(divergence: Divergence, *, brackets: bool = False) -> str:
    """Its size, in brackets or not, and the weights that cause it."""
    size, cause = _describe_error(divergence.sqnr_db, divergence.levels), explain_saturation(divergence.saturating)
    return (f"({size})" if brackets else size) + (f"; {cause}" if cause else "")


def _describe_error(sqnr_db: float, levels: float) -> str:
    return format_decibel(sqnr_db) + ("" if math.isnan(levels) else f", up to {levels:.0f} levels")


def _make_layer_table(found: Difference, view: View) -> Iterator[RenderableType]:
    layers, more = _select_layers(found, view)
    runs = list(dict.fromkeys(error.run for layer in found.layers for error in layer.accuracy))
    others = list(dict.fromkeys(error.run for layer in found.layers for error in layer.engines))
    labels = _label_runs(found)
    columns: tuple[str, ...] = ("tensor", "op", *(f"SQNR {labels[run]}" for run in runs), "drop")
    columns += (*(f"{labels[run]} against {labels[OFF]}" for run in others), "levels")
    if view.verbose:
        columns += ("cosine", "max abs", "max rel", "read at")
    rows = (_make_layer_row(layer, runs, others, view.verbose) for layer in layers)
    right = [c for c in columns if c not in ("tensor", "op", "read at")]
    yield make_table(columns, rows, right=right, names=("tensor", "read at"))
    if more:
        yield Text(more, style="dim")


def _select_layers(found: Difference, view: View) -> tuple[Sequence[LayerDiff], str]:
    """The layers to list, in the order of the network, and how many there are beside them."""
    order = {name: k for k, name in enumerate(found.worst)}
    ranked = sorted(found.layers, key=lambda layer: order.get(layer.name, len(order)))
    shown, more = select_rows(ranked, view)
    chosen = {layer.name for layer in shown}
    return [layer for layer in found.layers if layer.name in chosen], more


def _make_layer_row(layer: LayerDiff, runs: Sequence[str], others: Sequence[str], verbose: bool) -> tuple[str, ...]:
    accuracy = {error.run: error for error in layer.accuracy}
    engines = {error.run: error for error in layer.engines}
    levels = max((error.levels for error in layer.engines if not math.isnan(error.levels)), default=math.nan)
    cells = [layer.name, layer.op]
    cells += [format_decibel(accuracy[run].sqnr_db) if run in accuracy else "" for run in runs]
    cells.append("" if math.isnan(layer.drop_db) else f"{layer.drop_db:.1f}")
    cells += [format_decibel(engines[run].sqnr_db) if run in engines else "" for run in others]
    cells.append("" if math.isnan(levels) else f"{levels:.1f}")
    if verbose:
        worst = min(layer.accuracy, key=lambda error: error.sqnr_db, default=None)
        cells += list(_format_error(worst)[1:4]) if worst is not None else ["", "", ""]
        cells.append(layer.at)
    return tuple(cells)


def _find_warnings(found: Difference) -> Iterator[RenderableType]:
    labels = _label_runs(found)
    for one in found.divergences:
        from_there = f"something else than the file says is computed from {one.tensor} on"
        text = f"{labels[one.run]}: {from_there} {_describe(one, brackets=True)}"
        yield format_warning(Caution("W109", text), "bold red")
    for unmet in found.unmet:
        yield Text(f"unmet: output {unmet.output}: {describe_unmet(found, unmet)}", style="bold red")
    if found.synthetic:
        yield format_warning(warn_synthetic("the models were compared"))
