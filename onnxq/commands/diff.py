"""`onnxq diff`: a model and its quantized form in every engine, over samples, against tolerances."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePath

from onnxq.backends import list_runnable
from onnxq.config import Command, Config
from onnxq.data import load_data
from onnxq.engines.diff.compare import DiffResult, compare_models
from onnxq.engines.diff.model import (
    FLOAT,
    OFF,
    ON,
    Difference,
    Divergence,
    Error,
    LayerDiff,
    Unmet,
    explain_absence,
    label_run,
    label_runs,
)
from onnxq.engines.diff.results import INPUTS, RESULTS, find_inputs_beside, load_results, save_feeds
from onnxq.errors import OutputError, PlanError, VerificationError
from onnxq.files import name_folder, prepare_folder, write_text
from onnxq.graph import GraphIndex, ModelLike, add_libraries, load_model, name_nodes, save_model
from onnxq.passes.base import RunContext
from onnxq.pipeline import ModelSource, load_both, name_file
from onnxq.pipeline.configuration import Configuration, OutputPath, Overrides, open_run
from onnxq.progress import Progress, silent
from onnxq.report import Parts, RenderableType, Text, TextView, format_count, make_sheet, make_table
from onnxq.report.document import ResultFormat, Values, describe_verdict
from onnxq.report.model import list_figures, make_verdict, warn_synthetic
from onnxq.report.sentences import explain_saturation
from onnxq.report.terminal import (
    Group,
    SheetRows,
    format_decibel,
    format_figure,
    format_nodes,
    format_verdict,
    format_warning,
    list_choices,
    list_more,
    part_text,
    select_rows,
)
from onnxq.sites import Caution, Names, drop_repeats
from onnxq.wording import translate_text

REPORT = "diff.json"
# Layers in the summary without `verbose`.
_WORST = 5


def diff(
    model: ModelSource,
    quantized: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Difference:
    """Compare a quantized model with its float one: on ONNX Runtime, on other engines, and layer by layer.

    data: as for `quantize`; None takes the inputs saved beside the results of `load`, else synthetic ones.
    config, overrides: as for `quantize`, of which the sections `diff`, `data`, `verify` and `runtime` are used; its
    `provider` runs ONNX Runtime with optimizations, and without them, as the reference, the CPU does.
    out: a folder for results.json and inputs.json (Polygraphy's, of the first `keep` samples), diff.json and the pieces
    of bisection; force: overwrite earlier results there.

    Returns a Difference; `.holds` is False when a tolerance is unmet or an engine asked for could not run.
    Raises a subclass of OnnxqError for models that do not belong together, data that does not fit, missing packages.
    """
    folder = name_folder(out)
    guarded = (
        nullcontext() if folder is None else prepare_folder(folder, _list_files(folder, force))
    )
    # Guarded first: a folder made for a run that fails is removed again.
    with guarded, open_run(model, config, overrides, Command.DIFF) as chosen:
        with progress("reading the models"):
            loaded = [run for path in chosen.diff.load for run in load_results(path)]
            named = _load_named(model, chosen.runtime.libraries)
            other = _load_named(quantized, chosen.runtime.libraries)
        if data is None and loaded:
            data = find_inputs_beside(chosen.diff.load[0])
        dataset = load_data(data, GraphIndex(named).inputs, chosen.data, named, progress=progress)
        # In memory until they are written; without a folder they never are.
        keep = 0 if folder is None else chosen.diff.keep
        # It costs the rewrites of the float model once more, which outputs alone need not.
        inside = chosen.diff.layers or chosen.diff.bisect
        prepared = _load_prepared(model, quantized, chosen) if inside else None
        result = compare_models(
            named,
            other,
            dataset,
            chosen,
            keep=keep,
            loaded=loaded,
            prepared=prepared,
            progress=progress,
        )
        difference = replace(
            result.difference, float_model=name_file(model), quantized_model=name_file(quantized)
        )
        return difference if folder is None else _save(difference, result, folder, progress)


def _load_named(source: ModelSource, libraries: Names) -> ModelLike:
    return name_nodes(add_libraries(load_model(source, lazy=True).light, libraries))


def _load_prepared(model: ModelSource, quantized: ModelSource, config: Config) -> ModelLike | None:
    """The float model as the quantized one was made from it; None where its plan is of another model.

    Equalization scales channels and shifts them, so that tensors inside the float model are others.
    """
    try:
        return load_both(model, RunContext(config=config), quantized)[0].model
    except PlanError:
        return None


def _list_pieces() -> list[str]:
    """The files that bisection may write for a run: a model and its inputs."""
    runs = (OFF, ON, *list_runnable())
    return [f"bisect-{run}{end}" for run in runs for end in (".onnx", ".onnx_data", ".inputs.json")]


def _list_files(folder: Path, force: bool) -> list[str]:
    """The files that are written there. OutputError for a folder with earlier results, unless they may be replaced."""
    names = [RESULTS, INPUTS, REPORT, *_list_pieces()]
    # Links that lead nowhere would be replaced as well.
    there = [name for name in names if os.path.lexists(folder / name)]
    if there and not force:
        cause = f"holds {', '.join(there)} already"
        raise OutputError(folder, cause, "choose another folder, or pass `force=True`", code="Q601")
    return names


def _save(
    difference: Difference, result: DiffResult, folder: Path, progress: Progress
) -> Difference:
    """Write the results, as Polygraphy's files, so that `polygraphy run` can go on from them."""
    with progress("writing the results"):
        # Overwriting was allowed, or nothing was there, when `_list_files` looked.
        files = [*result.recorder.write(folder, overwrite=True)]
        bisections = []
        # An earlier run may have found more places than this one.
        for name in _list_pieces():
            (folder / name).unlink(missing_ok=True)
        for piece in result.pieces:
            stem = f"bisect-{piece.bisection.run}"
            path, inputs = (folder / f"{stem}{end}" for end in (".onnx", ".inputs.json"))
            save_model(piece.proto, path, overwrite=True)
            save_feeds(inputs, piece.feeds)
            files += [str(path), str(inputs)]
            bisections.append(replace(piece.bisection, path=str(path)))
    files.append(str(folder / REPORT))
    count = len(result.recorder.inputs)
    notes = difference.notes
    if count < difference.samples:
        notes = (
            *notes,
            f"the outputs of the first {count} of {difference.samples} samples were saved",
        )
    # Last, with the list of all other files in it.
    difference = replace(
        difference,
        saved=tuple(files),
        bisections=tuple(bisections) or difference.bisections,
        notes=notes,
    )
    write_text(folder / REPORT, FORM.write_json(difference), overwrite=True)
    return difference


def describe_unmet(difference: Difference, unmet: Unmet) -> str:
    """A tolerance that is not met: the run, the value and the bound."""
    bound = f"{'at most' if unmet.at_most else 'at least'} {unmet.wanted:g}"
    value = "nothing comparable" if math.isnan(unmet.value) else f"{unmet.value:.6g}"
    label = label_runs(difference).get(unmet.run, label_run(unmet.run))
    part = f" of {unmet.part}" if unmet.part else ""
    return f"{label}: {unmet.measure}{part} is {value}, {bound} is wanted"


def find_unmet_tolerance(difference: Difference) -> VerificationError | None:
    """The error of the first tolerance that is not met, else of a required engine that did not run; None without."""
    if difference.unmet:
        first = difference.unmet[0]
        more = len(difference.unmet) - 1
        cause = describe_unmet(difference, first)
        if more:
            cause += f"; and {format_count(more, 'more tolerance')} not met"
        return VerificationError(f"output {first.output}", cause, code="Q703")
    # After the tolerances, which say more of the model.
    if difference.missing:
        absences = {refusal.subject: refusal for refusal in difference.skipped}
        return explain_absence(absences[difference.missing[0]])
    return None


def _make_parts(difference: Difference, view: TextView) -> Parts:
    yield _make_title(difference)
    yield make_sheet(_make_rows(difference, view))
    if difference.layers:
        yield Text()
        yield from _make_layer_table(difference, view)


def _make_title(difference: Difference) -> Text:
    exact, quantized = (
        PurePath(path).name or "model"
        for path in (difference.float_model, difference.quantized_model)
    )
    title = Text(f"{quantized} against {exact}", style="bold")
    return title.join_text(f"  ({difference.data})") if difference.data else title


def _make_rows(difference: Difference, view: TextView) -> SheetRows:
    facts = ["on made-up inputs, which are not the task's"] if difference.synthetic else []
    choices = list(chain.from_iterable(difference.choices.values()))
    grade, text = make_verdict(list(list_figures(difference)), choices, facts)
    yield "verdict", format_verdict(grade.name, grade.style, text)
    rows = [(run.label, run.engine, run.samples) for run in difference.runs]
    headers = ("run", "engine", "samples")
    yield "runs", make_table(headers, rows, right=("samples",), fold=("run", "engine"))
    if difference.outputs:
        yield "outputs", _make_output_table(difference)
    for run, agreements in difference.choices.items():
        yield (
            "choices",
            Group(Text(label_runs(difference).get(run, run)), *list_choices(agreements)),
        )
    yield "engines", _describe_engines(difference)
    for piece in difference.bisections:
        names = format_nodes(piece.nodes, piece.ops)
        verdict = f"diverge by themselves at {piece.output} ({_describe_size(piece.sqnr_db, piece.levels)})"
        if piece.failure:
            verdict = f"cannot run by themselves ({piece.failure})"
        lines = [f"{label_run(piece.run)}: {len(piece.nodes)} nodes {verdict}: {names}"]
        if piece.path:
            lines.append(f"written to {piece.path}")
        yield "bisected", lines
    layers = {layer.name: layer for layer in difference.layers}
    worst = [layers[name] for name in difference.worst if name in layers]
    if worst:
        # Worst first, as `difference.worst` lists them.
        drops = [f"{layer.name} ({layer.op}): drops by {layer.drop_db:.1f} dB" for layer in worst]
        shown, more = select_rows(drops, view, _WORST)
        yield "worst", Text(*shown, *filter(None, (more,)))
    yield "not run", _list_skipped(difference)
    yield "notes", difference.notes
    yield "saved", difference.saved


def _list_skipped(difference: Difference) -> Iterator[str]:
    for skipped in difference.skipped:
        yield f"[{skipped.code}] {label_run(skipped.subject)}: {skipped.reason}"
        if skipped.fix:
            yield f"    fix: {translate_text(skipped.fix)}"


def _make_output_table(difference: Difference) -> RenderableType:
    best = f"top-{difference.top_k}"
    columns = (
        "output",
        "run",
        "SQNR",
        "cosine",
        "max abs",
        "max rel",
        best,
        f"against {label_run(OFF)}",
    )
    labels = label_runs(difference)
    rows = []
    parts: dict[str, Text] = {}
    for output in difference.outputs:
        against_off = _format_ratios(output.engines)
        for error in output.accuracy:
            name = output.name + error.part
            rows.append(
                (name, labels[error.run], *_format_error(error), against_off.get(error.run, ""))
            )
            if error.part:
                parts.setdefault(name, part_text(output.name, name, error.whole_db))
    return Group(
        make_table(columns, rows, right=columns[2:], names=("output",), fold=("run",)),
        *parts.values(),
    )


def _format_ratios(errors: Sequence[Error]) -> dict[str, str]:
    """SQNR by run."""
    return {error.run: format_decibel(error.sqnr_db) for error in errors}


def _format_error(error: Error) -> tuple[str, str, str, str, str]:
    return (
        format_decibel(error.sqnr_db),
        f"{error.cosine:.5f}",
        f"{error.max_abs:.3g}",
        f"{error.max_rel:.3g}",
        format_figure(100 * error.top_k, ".1f", "%"),
    )


def _describe_engines(difference: Difference) -> list[str]:
    labels = label_runs(difference)
    lines = []
    for divergence in difference.divergences:
        place = f"{divergence.tensor} ({divergence.op} {divergence.node})"
        size = _describe_size(divergence.sqnr_db, divergence.levels) + _explain_divergence(
            divergence
        )
        lines.append(f"{labels[divergence.run]}: diverges from the file first at {place}: {size}")
    if lines:
        return lines
    if any(output.engines for output in difference.outputs):
        return ["all agree within rounding"]
    names = ", ".join(label for run, label in labels.items() if run != FLOAT)
    return [f"only one engine ran ({names}): nothing to compare it with"]


def _explain_divergence(divergence: Divergence) -> str:
    """The weights that cause it, behind its size; "" if none do."""
    cause = explain_saturation(divergence.saturating)
    return f"; {cause}" if cause else ""


def _describe_size(sqnr_db: float, code_steps: float) -> str:
    return format_decibel(sqnr_db) + format_figure(code_steps, ".0f", " levels", before=", up to ")


def _make_layer_table(difference: Difference, view: TextView) -> Parts:
    order = {name: k for k, name in enumerate(difference.worst)}
    ranked = sorted(difference.layers, key=lambda layer: order.get(layer.name, len(order)))
    # The worst are selected, and listed in the order of the network.
    shown, more = select_rows(ranked, view)
    chosen = {layer.name for layer in shown}
    runs = drop_repeats(error.run for layer in difference.layers for error in layer.accuracy)
    others = drop_repeats(error.run for layer in difference.layers for error in layer.engines)
    labels = label_runs(difference)
    columns = (
        "tensor",
        "op",
        *(f"SQNR {labels[run]}" for run in runs),
        "drop",
        *(f"{labels[run]} against {labels[OFF]}" for run in others),
        "levels",
    )
    if view.verbose:
        columns += ("cosine", "max abs", "max rel", "read at")
    rows = (
        _make_layer_row(layer, runs, others, view.verbose)
        for layer in difference.layers
        if layer.name in chosen
    )
    right = [column for column in columns if column not in ("tensor", "op", "read at")]
    yield make_table(columns, rows, right=right, names=("tensor", "read at"))
    yield from list_more(more)


def _make_layer_row(
    layer: LayerDiff, runs: Sequence[str], others: Sequence[str], verbose: bool
) -> Names:
    accuracy = _format_ratios(layer.accuracy)
    engines = _format_ratios(layer.engines)
    code_steps = max(
        (error.levels for error in layer.engines if not math.isnan(error.levels)), default=math.nan
    )
    cells = [
        layer.name,
        layer.op,
        *(accuracy.get(run, "") for run in runs),
        format_figure(layer.drop_db, ".1f"),
        *(engines.get(run, "") for run in others),
        format_figure(code_steps, ".1f"),
    ]
    if verbose:
        worst = min(layer.accuracy, key=lambda error: error.sqnr_db, default=None)
        cells += ["", "", ""] if worst is None else _format_error(worst)[1:4]
        cells.append(layer.at)
    return tuple(cells)


def _list_warnings(difference: Difference) -> Iterator[Caution | Text]:
    labels = label_runs(difference)
    for divergence in difference.divergences:
        from_there = f"something else than the file says is computed from {divergence.tensor} on"
        size = _describe_size(divergence.sqnr_db, divergence.levels)
        text = f"{labels[divergence.run]}: {from_there} ({size}){_explain_divergence(divergence)}"
        yield format_warning(Caution("W109", text), "bold red")
    for unmet in difference.unmet:
        yield Text(
            f"unmet: output {unmet.output}: {describe_unmet(difference, unmet)}", style="bold red"
        )
    if difference.synthetic:
        yield warn_synthetic("the models were compared")


def _describe_more(difference: Difference) -> Values:
    return {
        "holds": difference.holds,
        "verdict": describe_verdict(list(list_figures(difference))),
        "messages": [describe_unmet(difference, unmet) for unmet in difference.unmet],
    }


FORM = ResultFormat[Difference](
    make_parts=_make_parts,
    list_warnings=_list_warnings,
    derive=_describe_more,
    find_fault=find_unmet_tolerance,
)
