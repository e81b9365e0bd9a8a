"""The summary of `quantize` and `apply`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType

from onnxq.engines.diff.model import OFF, ON, label_run
from onnxq.planner import Forced
from onnxq.report.columns import Text
from onnxq.report.document import report_json
from onnxq.report.model import OTHER_CPUS, SYNTHETIC, UNCHANGED, Report, group_reasons, make_verdict, warn_synthetic
from onnxq.report.precision import format_precision
from onnxq.report.promotions import make_promotion
from onnxq.report.terminal import (
    MORE,
    View,
    format_bytes,
    format_decibel,
    format_milliseconds,
    format_seconds,
    format_shapes,
    format_threads,
    format_verdict,
    format_warning,
    join_lines,
    list_choices,
    make_sheet,
    make_table,
    part_text,
    show_result,
)
from onnxq.runtime import CPU_KINDS
from onnxq.sites import Refusal, Unquantized
from onnxq.wording import translate_text

# Entries of a list without `verbose`.
_SHOWN = 6
_FILE, _RUN = label_run(OFF), label_run(ON)
_CPUS = {"any": "any x86", **CPU_KINDS}
_PLURALS = {"activation": "activations", "weight": "weights", "bias": "biases", "output": "outputs"}


def show_report(report: Report, view: View = View(), *, error: Mapping[str, Any] | None = None) -> None:
    """Print the summary. error: what the command fails with, though there is a report, for the JSON."""
    parts: list[RenderableType] = [_make_title(report), make_sheet(_make_rows(report, view.verbose))]
    if report.already:
        parts.insert(0, Text(report.already))
    show_result(view, lambda: report_json(report, error), parts, _make_warnings(report))


def format_reasons(found: Sequence[Unquantized], verbose: bool) -> Iterator[str]:
    """Yield lines on unquantized nodes by reason: number, reason, fix; with `verbose` every subject."""
    groups = group_reasons(found)
    for reason, members in groups if verbose else groups[:_SHOWN]:
        shown = members if verbose else members[:2]
        rest = f" and {len(members) - len(shown)} more" if len(members) > len(shown) else ""
        names = ", ".join(member.subject for member in shown)
        yield f"{len(members)} x [{members[0].code}] {translate_text(reason)} ({names}{rest})"
        for fix in sorted({m.fix for m in members if isinstance(m, Refusal) and m.fix}):
            yield f"    fix: {translate_text(fix)}"
    if not verbose and len(groups) > _SHOWN:
        yield f"and {len(groups) - _SHOWN} more reasons; {translate_text(MORE)}"


def format_forced(forced: Forced) -> str:
    """Format what rules that force operators cost: number, names, predicted time."""
    names = ", ".join(forced.names[:2]) + (f" and {len(forced.names) - 2} more" if len(forced.names) > 2 else "")
    count = f"{len(forced.names)} operator{'' if len(forced.names) == 1 else 's'} by rules ({names})"
    return f"{count}: predicted {forced.slowdown:.2f}x the time of the choice without them"


def format_roles(roles: Sequence[tuple[str, int]]) -> str:
    """Format counts of roles: 60 activations, 50 weights, 1 bias."""
    return ", ".join(f"{count} {role if count == 1 else _PLURALS.get(role, role)}" for role, count in roles if count)


def _make_title(report: Report) -> Text:
    text = Text(PurePath(report.source).name or "model", style="bold")
    if report.output:
        text.join_text(f" -> {report.output}")
    purpose = f" for {_CPUS.get(report.cpu, report.cpu)}" if report.cpu else ""
    facts = [part for part in (report.target, report.config, f"placement by {report.placement}{purpose}") if part]
    return text.join_text(f"  ({', '.join(facts)})", style="dim")


def _make_rows(report: Report, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    yield "verdict", _make_verdict(report)
    if change := _describe_size(report):
        yield "size", Text(f"{format_bytes(report.source_bytes)} -> {format_bytes(report.output_bytes)}, {change}")
    if report.latency is not None:
        yield "latency", _make_latency(report)
    if report.checks:
        yield "accuracy", _make_checks(report)
    elif report.unchecked:
        yield "accuracy", Text(report.unchecked, style="yellow")
    if report.pairs or report.sites:
        roles = format_roles(report.roles)
        dynamic = f"; {report.dynamic} on scales of each run" if report.dynamic else ""
        yield "pairs", Text(f"{report.pairs} Q/DQ pairs" + (f": {roles}" if roles else "") + dynamic)
    if report.ops:
        yield "quantized", Text(", ".join(f"{op.op} {op.quantized}/{op.total}" for op in report.ops))
    if report.accounts:
        yield "passes", Text(*report.accounts)
    if report.promotion is not None:
        yield "promoted", make_promotion(report.promotion)
    lists: tuple[tuple[str, Sequence[str]], ...] = (("prepared", report.rewrites), ("kept", report.kept))
    for label, lines in lists:
        if lines:
            yield label, join_lines(lines, verbose, _SHOWN)
    if report.forced is not None:
        yield "forced", Text(format_forced(report.forced))
    if report.refusals:
        yield "refused", Text(*format_reasons(report.refusals, verbose))
    if report.left_float:
        yield "left float", Text(*format_reasons(report.left_float, verbose))
    if report.float_types is not None:
        yield "float types", Text(*format_precision(report.float_types, verbose))
    if report.data:
        yield "data", Text(report.data)
    if report.code:
        yield "ran", Text(*report.code)
    if report.stages:
        yield "time", _make_stages(report, verbose)
    if verbose and report.sites:
        rows = ((s.site, s.role, s.spec, s.scale, s.rule) for s in report.sites)
        yield (
            "sites",
            make_table(("site", "role", "spec", "scale", "rule"), rows, names=("site",), fold=("spec", "rule")),
        )


def _make_verdict(report: Report) -> Text:
    """The verdict on the result, with its gains."""
    latency, wish, facts = report.latency, report.promotion, []
    if report.figures and report.made_up and not report.unchanged:
        facts.append("on made-up inputs, which are not the task's")
    if report.segments:
        facts.append(f"in the worst of {report.segments} segments")
    if wish is not None and wish.required and not wish.met:
        facts.append(f"{wish.asked} does NOT hold")
    facts.append(_describe_size(report))
    if latency is not None and not math.isnan(latency.ratio):
        facts.append(f"{latency.ratio:.2f}x {'the speed of float' if report.slower else 'faster'}")
    grade, text = make_verdict(report.figures, report.choices, ([] if report.figures else [report.unchecked]) + facts)
    if report.unchanged:
        more = " more" if report.already else ""
        why = f"int8 would not pay, so that nothing{more} is quantized"
        why = "what was asked for was refused" if report.refusals else why
        grade, text = UNCHANGED, "; ".join(filter(None, (why, *facts)))
    return format_verdict(grade.name, grade.style, text)


def _describe_size(report: Report) -> str:
    if not report.source_bytes or not report.output_bytes:
        return ""
    ratio = report.source_bytes / report.output_bytes
    return f"{ratio:.1f}x smaller" if ratio >= 1 else f"{1 / ratio:.1f}x larger"


def _make_latency(report: Report) -> Text:
    latency = report.latency
    if latency is None or math.isnan(latency.ratio):
        return Text("not measured")
    on = f"on {_CPUS.get(latency.cpu, latency.cpu)}" if latency.cpu else ""
    run = ", ".join(filter(None, ("median", format_threads(latency.threads), format_shapes(latency.shapes), on)))
    times = f"{format_milliseconds(latency.float_ms)} -> {format_milliseconds(latency.int8_ms)}"
    if report.slower:
        return Text(f"{times}, {latency.ratio:.2f}x: SLOWER than float ({run})", style="bold red")
    return Text(f"{times}, {latency.ratio:.2f}x faster ({run})")


def _make_checks(report: Report) -> RenderableType:
    columns = (
        "output",
        *(f"{what} {how}" for what in ("SQNR", "cosine") for how in (_FILE, _RUN)),
        "one against the other",
    )
    ranked = any(check.rows for check in report.checks)
    columns += ("top-1 as ORT runs it",) if ranked else ()
    rows = (
        (
            check.worst[0],
            *(format_decibel(value) for value in check.sqnr_db),
            *("n/a" if math.isnan(value) else f"{value:.5f}" for value in check.cosine),
            format_decibel(check.agreement_db),
            *(("" if math.isnan(check.top_1[1]) else f"{100 * check.top_1[1]:.1f}%",) if ranked else ()),
        )
        for check in report.checks
    )
    basis = ""
    if report.checked:
        plural = "s" if report.checked != 1 else ""
        how = f"also used for {report.seen}" if report.seen else "held back, nothing was chosen on them"
        how = how if plural or report.seen else "held back, nothing was chosen on it"
        samples = report.made_up or f"{report.checked} sample{plural} ({how})"
        basis = f"against float on {samples}; "
    legend = [f"{basis}{_FILE}: ORT's optimizations off; {_RUN}: all of them on"]
    if report.segments:
        compared = f"compared in {report.segments} segments, each on the float model's values"
        legend.append(f"{compared}, as models of 1 GB and more are; the worst are shown")
    parts = [part_text(check.name, *check.worst) for check in report.checks if any(check.parts)]
    table = make_table(columns, rows, right=columns[1:], names=("output",))
    return Group(table, *parts, *list_choices(report.choices), Text(*legend, style="dim"))


def _make_stages(report: Report, verbose: bool) -> RenderableType:
    peak = max(stage.peak_bytes for stage in report.stages)
    total = format_seconds(sum(stage.seconds for stage in report.stages))
    if verbose:
        rows = (
            (s.name, format_seconds(s.seconds), format_bytes(s.peak_bytes) if s.peak_bytes else "")
            for s in report.stages
        )
        return make_table(("stage", "time", "peak memory"), rows, right=("time", "peak memory"))
    parts = ", ".join(f"{stage.name} {format_seconds(stage.seconds)}" for stage in report.stages)
    return Text(f"{total} ({parts})" + (f", peak memory {format_bytes(peak)}" if peak else ""))


def _make_warnings(report: Report) -> Iterator[RenderableType]:
    # Printed last, so that they are still on the screen when the command ends.
    for warning in report.warnings:
        if report.synthetic and warning.code == SYNTHETIC.code:
            continue  # the plan's copy; the banner below replaces it
        if report.unchanged and warning.code == OTHER_CPUS:
            continue  # the alarm says it
        yield format_warning(warning)
    for alarm in report.alarms():
        # That int8 does not pay is no failure.
        yield format_warning(alarm, "yellow" if report.unchanged and not report.refusals else "bold red")
    if report.synthetic and not report.calibrated:
        # Weights need no samples, but the check against float then says little.
        yield format_warning(warn_synthetic("the check ran"))
    elif report.synthetic:
        rule = "!" * 72
        banner = f"!! {translate_text(SYNTHETIC)} [{SYNTHETIC.code}]"
        yield Text(rule, banner, rule, style="bold white on red")
