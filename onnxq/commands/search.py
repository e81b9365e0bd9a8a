"""`onnxq search`: the precision of each operator under limits on size, time and accuracy."""

import io
from dataclasses import replace
from pathlib import Path

from onnxq.config import Command, Config
from onnxq.errors import VerificationError
from onnxq.files import replace_files, write_text
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, open_run, write_result
from onnxq.pipeline.record import write_run
from onnxq.pipeline.search import SearchResult, search_precisions
from onnxq.progress import Progress, silent
from onnxq.report import Parts, RenderableType, ResultFormat, Text, TextView, make_table
from onnxq.report.record import FrontPoints
from onnxq.report.terminal import format_bytes, format_decibel, format_figure, format_milliseconds


def search(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> SearchResult:
    """Choose the precision of each operator so that the model keeps limits on its size, its time and its accuracy.

    model, data, config, overrides, out, force: as for `quantize`. The limits are `max_size`, `max_latency` (ms on this
    machine), `min_sqnr`, or `metric` with `max_drop`: with an accuracy among them the smallest file is looked for
    (`minimize="latency"`: the fastest), without one the most accurate.

    Returns a SearchResult; where no model keeps the limits, `.met` is False and the nearest one is taken.
    Raises a subclass of OnnxqError for whatever the caller can mend; nothing is written then.
    """
    with open_run(model, config, overrides, Command.SEARCH, out=out, force=force) as chosen:
        outcome = search_precisions(model, data, chosen, progress=progress)
        result = write_result(outcome.result, chosen, out, force, progress)
        outcome = replace(outcome, result=result)
        _write_forms(outcome, chosen, force)
        if chosen.output.report:
            write_run(
                model,
                result,
                data,
                chosen,
                force,
                progress,
                front=outcome.front,
                asked=outcome.asked,
            )
        return outcome


def _write_forms(found: SearchResult, config: Config, force: bool) -> None:
    options = config.search
    for path, text in ((options.rules, found.rules), (options.csv, found.to_csv())):
        if path:
            write_text(Path(path), text, overwrite=force)
    if options.plot:
        image = io.BytesIO()
        found.plot().figure.savefig(image, format=Path(options.plot).suffix.lstrip(".") or "png")
        with replace_files([Path(options.plot)], overwrite=force) as files:
            files[0].write(image.getvalue())


def _make_parts(found: SearchResult, view: TextView) -> Parts:
    yield Text(f"asked: {found.asked}", style="bold")
    yield make_front(found.front)
    yield Text()


def make_front(front: FrontPoints) -> RenderableType:
    """Make the table of what was measured, beside what was expected of it."""
    columns = ["", "operators", "SQNR", "expected", "size", "expected"]
    timed = any(point.latency_ms is not None for point in front)
    measured = any(point.metric is not None for point in front)
    if timed:
        columns += ["latency", "expected"]
    if measured:
        columns.append("metric")
    rows = []
    for point in front:
        mark = "taken" if point.taken else "" if point.holds else "beyond"
        expected = "" if point.predicted_db is None else format_decibel(point.predicted_db)
        size = "" if point.predicted_bytes is None else format_bytes(point.predicted_bytes)
        row = [
            mark,
            point.describe(),
            format_decibel(point.sqnr_db),
            expected,
            format_bytes(point.bytes),
            size,
        ]
        if timed:
            row += [
                "" if ms is None else format_milliseconds(ms)
                for ms in (point.latency_ms, point.predicted_ms)
            ]
        if measured:
            row.append(format_figure(point.metric, ".4g"))
        rows.append(row)
    return make_table(columns, rows, right=columns[2:], fold=("operators",))


def find_missed_limit(found: SearchResult) -> VerificationError | None:
    """The error of limits that no model keeps; None where one does."""
    if found.met:
        return None
    taken = next(point for point in found.front if point.taken)
    figures = f"{format_decibel(taken.sqnr_db)}, {format_bytes(taken.bytes)}"
    cause = f"no model keeps {found.asked}; the nearest has {figures}"
    return VerificationError("search", cause, "it is written all the same", code="Q712")


FORM = ResultFormat[SearchResult](
    make_parts=_make_parts,
    derive=lambda found: {"applied": found.report},
    hidden="result",
    find_fault=find_missed_limit,
    # Of a result that misses what was asked for.
    exit_code=4,
)
