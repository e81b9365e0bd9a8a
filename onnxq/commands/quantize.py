"""`onnxq quantize`: a float model in, a quantized one out; and the summary of `quantize` and `apply`."""

import math
from collections.abc import Iterator
from operator import attrgetter

from onnxq.backends import find_compiler
from onnxq.config import Command
from onnxq.engines.diff.model import LABELS, OFF, ON
from onnxq.engines.prove.proof import UNSEEN
from onnxq.errors import ConfigError, VerificationError
from onnxq.passes.journal import Promotion
from onnxq.pipeline import ModelSource, Result, quantize_model, write_result
from onnxq.pipeline.configuration import Configuration, OutputPath, Overrides, open_run
from onnxq.pipeline.record import write_run
from onnxq.progress import Progress, silent
from onnxq.report import Report, Text, make_verdict, warn_synthetic
from onnxq.report.document import ResultFormat, Values, describe_verdict
from onnxq.report.model import GRADES, OTHER_CPUS, SYNTHETIC, UNCHANGED, EngineCheck
from onnxq.report.sentences import format_forced, format_precision, format_reasons, format_roles
from onnxq.report.terminal import (
    Group,
    Parts,
    RenderableType,
    SheetRows,
    TextView,
    format_bytes,
    format_count,
    format_decibel,
    format_figure,
    format_seconds,
    format_shapes,
    format_threads,
    format_verdict,
    format_warning,
    join_lines,
    list_choices,
    make_sheet,
    make_table,
    make_title,
    part_text,
)
from onnxq.runtime import CPU_KINDS
from onnxq.sites import Caution
from onnxq.wording import translate_text

# Entries of a list without `verbose`.
_SHOWN = 6
# Seconds: what is shorter rounds to nothing.
_SHORTEST = 0.05
_FILE = LABELS[OFF]
_RUN = LABELS[ON]
_CPUS = {"any": "any x86", **CPU_KINDS}


def quantize(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Result:
    """Quantize an ONNX model and check the result against the float one.

    model: path or ModelProto; never changed. data: a path, an iterable of {input: array}, a dict of
    arrays or a `file.py:function`; None calibrates on seeded synthetic inputs and warns.
    config: preset name, YAML file or Config; None is the preset `ort-int8`. overrides: values on top of it, by the
    names of the command's options or by paths: {"min_sqnr": 30, "weights.bits": 4}; None is not given.
    In Python `metric` may also be a function of a model (see MetricModel) that gives a number, higher is better.
    out: file to write; force: overwrite it.

    Returns a Result with `.model`, `.plan`, `.report` and `.save()`.
    Raises a subclass of OnnxqError for whatever the caller can mend; nothing is written then.
    """
    with open_run(model, config, overrides, Command.QUANTIZE, out=out, force=force) as chosen:
        if chosen.output.compiled:
            # Raises where there is none, before the work rather than behind it.
            find_compiler(chosen.target)
        if chosen.output.report and isinstance(data, Iterator):
            fix = "give a list, or a function that returns an iterator"
            raise ConfigError(
                "data",
                "an iterator is read once, and `report_out=…` reads it again",
                fix,
                code="Q317",
            )
        result = quantize_model.quantize(model, data, chosen, progress=progress)
        result = write_result(result, chosen, out, force, progress)
        if chosen.output.report:
            write_run(model, result, data, chosen, force, progress)
        return result


def _make_parts(report: Report, view: TextView) -> Parts:
    # First, since it changes the meaning of all that follows.
    if report.already:
        yield Text(report.already)
    yield _make_title(report)
    yield make_sheet(_make_rows(report, view.verbose))


def _make_title(report: Report) -> Text:
    text = make_title(report.source)
    if report.output:
        text.join_text(f" -> {report.output}")
    purpose = f" for {_CPUS.get(report.cpu, report.cpu)}" if report.cpu else ""
    facts = (report.target, report.config, f"placement by {report.placement}{purpose}")
    return text.join_facts(filter(None, facts))


def _make_rows(report: Report, verbose: bool) -> SheetRows:
    yield "verdict", _make_verdict(report)
    if change := _describe_size(report):
        sizes = f"{format_bytes(report.source_bytes)} -> {format_bytes(report.output_bytes)}"
        yield "size", f"{sizes}, {change}{_explain_size(report)}"
    yield "latency", _make_latency(report)
    if report.checks:
        yield "accuracy", _make_checks(report)
    elif report.unchecked:
        yield "accuracy", Text(report.unchecked, style="yellow")
    for engine in report.engines:
        yield f"on {engine.engine}", _describe_engine(engine, alone=len(report.engines) == 1)
    if report.pairs or report.sites:
        roles = format_roles(report.roles)
        pairs = format_count(report.pairs, "Q/DQ pair")
        text = f"{pairs}: {roles}" if roles else pairs
        yield "pairs", f"{text}; {report.dynamic} on scales of each run" if report.dynamic else text
    yield "quantized", ", ".join(f"{op.op} {op.quantized}/{op.total}" for op in report.ops)
    yield "passes", report.accounts
    yield "promoted", make_promotion(report.promotion)
    for label, lines in (("prepared", report.rewrites), ("kept", report.kept)):
        yield label, join_lines(lines, verbose, _SHOWN)
    yield "forced", format_forced(report.forced) if report.forced else None
    yield "refused", format_reasons(report.refusals, verbose)
    yield "left float", format_reasons(report.left_float, verbose)
    yield "float types", format_precision(report.float_types, verbose)
    yield "data", report.data
    yield "ran", report.code
    if report.stages:
        yield "time", _make_stages(report, verbose)
    if verbose and report.sites:
        columns = ("site", "role", "spec", "scale", "rule")
        rows = map(attrgetter(*columns), report.sites)
        yield "sites", make_table(columns, rows, names=("site",), fold=("spec", "rule"))


def _make_verdict(report: Report) -> Text:
    """The verdict on the result, with its gains."""
    facts = []
    latency = report.latency
    promotion = report.promotion
    if report.figures and report.made_up and not report.unchanged:
        facts.append("on made-up inputs, which are not the task's")
    if report.segments:
        facts.append(f"in the worst of {report.segments} segments")
    if promotion and promotion.required and not promotion.met:
        facts.append(f"{promotion.asked} does NOT hold")
    facts.append(_describe_size(report))
    if latency and not math.isnan(latency.ratio):
        facts.append(f"{latency.ratio:.2f}x {'the speed of float' if report.slower else 'faster'}")
    # The outputs are exact then, which would read as a success.
    if report.unchanged:
        reason = f"nothing{' more' if report.already else ''} is quantized"
        if report.refusals:
            reason = (
                f"what was asked for was refused{' or would not pay' if report.left_float else ''}"
            )
        elif report.left_float:
            reason = f"int8 would not pay, so that {reason}"
        return format_verdict(
            UNCHANGED.name, UNCHANGED.style, "; ".join(filter(None, (reason, *facts)))
        )
    if not report.figures:
        facts.insert(0, report.unchecked)
    grade, text = make_verdict(report.figures, report.choices, facts)
    grade = report.grade or grade
    if grade is GRADES[2] and not ((promotion and promotion.required) or report.made_up):
        text += translate_text("; `min_sqnr=20` leaves float what costs most")
    word = f"{grade.name} by {report.refusers}" if report.refusers else grade.name
    return format_verdict(word, grade.style, text)


def _describe_size(report: Report) -> str:
    if not (report.source_bytes and report.output_bytes):
        return ""
    ratio = report.source_bytes / report.output_bytes
    if 0.95 < ratio < 1.05:
        return "about as large"
    return f"{ratio:.1f}x smaller" if ratio >= 1 else f"{1 / ratio:.1f}x larger"


def _explain_size(report: Report) -> str:
    """Why the file is larger than the source, or how it would be smaller; "" where there is nothing to say."""
    if not report.note_bytes:
        if (
            report.pairs
            and report.left_float
            and 2 * report.output_bytes > report.source_bytes
            and report.has_smaller_mode
        ):
            return "; `mode: weight-only` makes it smaller, and what stays float no faster"
        return ""
    text = f": {format_bytes(report.note_bytes)} are notes, which `notes='none'` leaves out"
    larger = report.output_bytes > report.source_bytes
    if larger and any(line.startswith("constants: ") for line in report.rewrites):
        text += "; constants that the model computed are stored"
    return translate_text(text)


def _make_latency(report: Report) -> Text | None:
    latency = report.latency
    if not latency:
        return None
    if math.isnan(latency.ratio):
        return Text("not measured")
    cpu = f"on {_CPUS.get(latency.cpu, latency.cpu)}" if latency.cpu else ""
    run = ", ".join(
        filter(
            None,
            (
                "median",
                format_threads(latency.threads),
                format_shapes(latency.shapes),
                cpu,
                latency.engine,
            ),
        )
    )
    return Text(f"{latency.describe()} ({run})", style="bold red" if report.slower else "")


def _make_checks(report: Report) -> RenderableType:
    here = any(check.optimized for check in report.checks)
    runs = (_FILE, _RUN) if here else (_FILE,)
    engines = {
        engine.run: {output.name: output.sqnr_db for output in engine.outputs}
        for engine in report.engines
        if engine.outputs
    }
    ranked = any(check.rows for check in report.checks)
    columns = ["output"]
    columns += [f"SQNR {run}" for run in (*runs, *engines)]
    columns += [f"cosine {run}" for run in runs]
    if here:
        columns.append("one against the other")
    if ranked:
        columns.append(f"top-1 {runs[-1]}")
    rows = []
    for check in report.checks:
        cells = [check.worst[0]]
        cells += map(format_decibel, check.sqnr_db[: len(runs)])
        cells += [format_decibel(ratios.get(check.name, math.nan)) for ratios in engines.values()]
        cells += [format_figure(cosine, ".5f") or "n/a" for cosine in check.cosine[: len(runs)]]
        if here:
            cells.append(format_decibel(check.agreement_db))
        if ranked:
            cells.append(format_figure(100 * check.top_1[len(runs) - 1], ".1f", "%"))
        rows.append(cells)
    basis = ""
    if report.checked:
        use = f"also used for {report.seen}" if report.seen else "held back from every choice"
        samples = report.made_up or f"{format_count(report.checked, 'sample')} ({use})"
        basis = f"against float on {samples}; "
    legend = [f"{basis}{_FILE}: ORT's optimizations off"]
    if here:
        legend[0] += f"; {_RUN}: all of them on"
    if report.segments:
        compared = f"compared in {report.segments} segments, each on the float model's values"
        legend.append(f"{compared}, as models of 1 GB and more are; the worst are shown")
    parts = [part_text(check.name, *check.worst) for check in report.checks if any(check.parts)]
    table = make_table(columns, rows, right=columns[1:], names=("output",))
    return Group(table, *parts, *list_choices(report.choices), Text(*legend, style="dim"))


def _describe_engine(check: EngineCheck, *, alone: bool) -> Text:
    """The model on an engine of its target, in a sentence. alone: there is no other, and its times stand elsewhere."""
    if check.reason:
        return Text(f"not checked: {check.reason}", style="yellow")
    outputs = [
        f"{output.name} has {format_decibel(output.sqnr_db)} against float, {format_decibel(output.agreement_db)} "
        "against the file"
        for output in check.outputs
    ]
    place = f"{'emulated ' if check.emulated else ''}on {format_count(check.samples, 'sample')}"
    answers = f"{check.run}, {place}: {', '.join(outputs)}"
    words = {UNSEEN: "a type that it does not show"}
    products = ", ".join(f"{count} in {words.get(dtype, dtype)}" for dtype, count in check.types)
    facts = [answers, f"products {products}" if products else "no products"]
    if check.partitions or check.left:
        left = "nothing left to the CPU"
        if check.left:
            count = format_count(len(check.left), "node")
            left = f"{count} left to the CPU, e.g. {check.left[0]}"
        facts += [format_count(check.partitions, "partition"), left]
    if check.latency is not None and not alone:
        facts.append(check.latency.describe())
    return Text("; ".join(facts))


def _make_stages(report: Report, verbose: bool) -> RenderableType:
    if verbose:
        rows = [
            (
                stage.name,
                format_seconds(stage.seconds),
                format_bytes(stage.peak_bytes) if stage.peak_bytes else "",
            )
            for stage in report.stages
        ]
        return make_table(("stage", "time", "peak memory"), rows, right=("time", "peak memory"))
    parts = ", ".join(
        f"{stage.name} {format_seconds(stage.seconds)}"
        for stage in report.stages
        if stage.seconds >= _SHORTEST
    )
    seconds = format_seconds(sum(stage.seconds for stage in report.stages))
    text = f"{seconds} ({parts})" if parts else seconds
    peak = max(stage.peak_bytes for stage in report.stages)
    return Text(f"{text}, peak memory {format_bytes(peak)}" if peak else text)


def _list_warnings(report: Report) -> Iterator[Caution | Text]:
    # Printed last, so that they are still on the screen when the command ends.
    for warning in report.warnings:
        if report.synthetic and warning.code == SYNTHETIC.code:
            continue  # the plan's copy; the banner below replaces it
        if report.unchanged and warning.code == OTHER_CPUS:
            continue  # the alarm says it
        yield warning
    for alarm in report.alarms():
        # That int8 does not pay is no failure.
        yield format_warning(
            alarm, "yellow" if report.unchanged and not report.refusals else "bold red"
        )
    if report.synthetic and not report.calibrated:
        # Weights need no samples, but the check against float then says little.
        yield warn_synthetic("the check ran")
    elif report.synthetic:
        rule = "!" * 72
        banner = f"!! {translate_text(SYNTHETIC)} [{SYNTHETIC.code}]"
        yield Text(rule, banner, rule, style="bold white on red")


def describe_promotion(promotion: Promotion) -> str:
    """The outcome in a sentence."""
    figure = _format_value(promotion, promotion.value)
    if not math.isnan(promotion.spread):
        figure = f"{promotion.value:.1f} ± {promotion.spread:.1f} dB"
    if promotion.part:
        figure += f" at {promotion.part}"
    elif not math.isnan(promotion.float_value):
        figure += f" (float {_format_value(promotion, promotion.float_value)})"
    if not math.isnan(promotion.spread):
        figure += f" on {format_count(promotion.samples, 'sample')}"
        if abs(promotion.value - promotion.least) < promotion.spread:
            figure += f", which may {'not ' if promotion.met else ''}hold on others"
    change = "nothing had to be promoted" if promotion.met else "nothing was promoted"
    if promotion.steps:
        total = promotion.operators + promotion.left
        change = f"{format_count(promotion.operators, 'operator')} of {total} promoted"
    outcome = "holds" if promotion.met else "does NOT hold"
    parts = [f"{promotion.asked}: {outcome} with {figure}", change, promotion.note]
    if promotion.headroom > 1:
        parts.append(
            f"ranges reach {promotion.headroom - 1:.0%} further than on the samples, as the request allows"
        )
    return "; ".join(filter(None, parts))


def find_unmet_accuracy(report: Report) -> VerificationError | None:
    """The error of an accuracy that was asked for and is not reached; None where it is, or where none was."""
    promotion = report.promotion
    if promotion is None or not promotion.required or promotion.met:
        return None
    cause = describe_promotion(promotion)
    return VerificationError("accuracy", cause, "the model is written all the same", code="Q709")


def _format_value(promotion: Promotion, value: float) -> str:
    return format_decibel(value) if promotion.unit == "dB" else f"{value:.4g}"


def make_promotion(promotion: Promotion | None) -> RenderableType | None:
    """Make the outcome and a row for each step; None for none."""
    if promotion is None:
        return None
    outcome = Text(describe_promotion(promotion), style="" if promotion.met else "bold red")
    if not promotion.steps:
        return outcome
    rows = [
        (
            step.name,
            step.to,
            len(step.nodes),
            _format_value(promotion, step.before),
            _format_value(promotion, step.after),
        )
        for step in promotion.steps
    ]
    columns = ("site", "to", "operators", "before", "after")
    basis = f"before and after on {promotion.samples} samples" if promotion.samples else ""
    if not math.isnan(promotion.spread):
        basis += ", each with the ranges of the others; ±: 19 in 20 others have no less"
    return Group(
        outcome,
        make_table(columns, rows, right=columns[2:], names=("site",)),
        Text(basis, style="dim"),
    )


def _derive_values(report: Report) -> Values:
    return {
        "roles": dict(report.roles),
        "slower": report.slower,
        "alarms": report.alarms(),
        "verdict": describe_verdict(report.figures, report.grade),
    }


FORM = ResultFormat[Report](
    make_parts=_make_parts,
    list_warnings=_list_warnings,
    derive=_derive_values,
    find_fault=find_unmet_accuracy,
    # Of a result that misses the accuracy that was asked for.
    exit_code=4,
)
