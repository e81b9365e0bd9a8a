"""Promotions to wider types for a requested accuracy, as frozen values and as a table."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType

from onnxq.errors import VerificationError
from onnxq.passes.journal import Promotion
from onnxq.report.columns import Text
from onnxq.report.model import Report
from onnxq.report.terminal import format_decibel, make_table


def describe_promotion(found: Promotion) -> str:
    """The outcome in a sentence."""
    done = f"{found.operators} operators" if found.operators != 1 else "1 operator"
    held = "holds" if found.met else "does NOT hold"
    tail = f"; {found.note}" if found.note else ""
    if found.headroom > 1:
        tail += f"; ranges reach {found.headroom - 1:.0%} further than on the samples, as the request allows"
    whole = "" if math.isnan(found.float_value) else f" (float {_figure(found, found.float_value)})"
    whole = f" at {found.part}" if found.part else whole
    value = _figure(found, found.value)
    if not math.isnan(found.spread):
        value = f"{found.value:.1f} ± {found.spread:.1f} dB"
        whole += f" on {found.samples} sample{'' if found.samples == 1 else 's'}"
        if abs(found.value - found.least) < found.spread:
            whole += f", which may {'not ' if found.met else ''}hold on others"
    became = f"{done} of {found.operators + found.left} promoted" if found.steps else "nothing had to be promoted"
    if not found.steps and not found.met:
        became = "nothing was promoted"
    return f"{found.asked}: {held} with {value}{whole}; {became}{tail}"


def find_unmet_accuracy(report: Report) -> VerificationError | None:
    """The error of an accuracy that was asked for and is not reached; None where it is, or where none was."""
    found = report.promotion
    if found is None or not found.required or found.met:
        return None
    return VerificationError("accuracy", describe_promotion(found), "the model is written all the same", code="Q709")


def _figure(found: Promotion, value: float) -> str:
    return format_decibel(value) if found.unit == "dB" else f"{value:.4g}"


def make_promotion(found: Promotion) -> RenderableType:
    """Make the outcome and a row for each step."""
    style = "" if found.met else "bold red"
    if not found.steps:
        return Text(describe_promotion(found), style=style)
    rows = (
        (one.name, one.to, str(len(one.nodes)), _figure(found, one.before), _figure(found, one.after))
        for one in found.steps
    )
    where = f"before and after on {found.samples} samples" if found.samples else ""
    where += "" if math.isnan(found.spread) else ", each with the ranges of the others; ±: 19 in 20 others have no less"
    made = make_table(
        ("site", "to", "operators", "before", "after"), rows, right=("operators", "before", "after"), names=("site",)
    )
    return Group(Text(describe_promotion(found), style=style), made, Text(where, style="dim"))
