"""`onnxq report`: where the error of a quantized model is, what runs each operator, and what to do, on one page."""

import json

from onnxq.config import Command
from onnxq.errors import ConfigError
from onnxq.files import AnyPath
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, open_run
from onnxq.pipeline.quantize_model import quantize
from onnxq.pipeline.record import describe_result, measure_record, write_forms
from onnxq.progress import Progress, silent
from onnxq.report import ResultFormat, Text
from onnxq.report.page import describe_effect, list_loudest
from onnxq.report.record import ReportRecord, read_record
from onnxq.report.terminal import Parts, SheetRows, TextView, format_verdict, make_sheet


def make_report(
    model: ModelSource | None = None,
    quantized: ModelSource | None = None,
    data: object = None,
    config: Configuration = None,
    *,
    record: AnyPath | None = None,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> ReportRecord:
    """Measure where the error of a quantized model comes from, and write it as a page and in other forms.

    quantized: a Q/DQ model made from `model`, by any tool; without it `model` is quantized as `quantize` would with
    this configuration. data, config, overrides: as for `quantize`. record: a page or JSON written before, which is
    shown again in the place of all that. out: the page.

    Returns the ReportRecord; `read_record` reads it back from a page.
    Raises a subclass of OnnxqError for models that do not belong together, and data that does not fit.
    """
    with open_run(model or "", config, overrides, Command.REPORT, out=out, force=force) as chosen:
        if record is not None:
            shown = read_record(record)
        elif model is None:
            raise ConfigError(
                "model",
                "none was given",
                "name the float model, or a page: `record=…`",
                code="Q304",
            )
        elif quantized is None:
            result = quantize(model, data, chosen, progress=progress)
            shown = describe_result(model, result, data, chosen, progress)
        else:
            shown = measure_record(model, quantized, data, chosen, progress)
        write_forms(shown, chosen, out, force)
    return shown


def _make_parts(record: ReportRecord, view: TextView) -> Parts:
    yield Text(f"{record.title}  ({record.quantized or 'quantized'})", style="bold")
    yield make_sheet(_make_rows(record))


def _make_rows(record: ReportRecord) -> SheetRows:
    yield "verdict", format_verdict(record.grade, "bold", record.verdict)
    yield (
        "loudest",
        tuple(
            "; ".join((f"{node.name}: {100 * node.share:.0f} % of the noise", *causes))
            for node, causes in list_loudest(record)
        ),
    )
    for advice in record.advice:
        yield f"{len(advice.nodes)} in float", (describe_effect(advice), *advice.rule.splitlines())
    yield "data", record.data


FORM = ResultFormat[ReportRecord](
    make_parts=_make_parts,
    only=lambda record: json.loads(record.to_json()),
    list_warnings=lambda record: [Text(line, style="yellow") for line in record.warnings],
)
