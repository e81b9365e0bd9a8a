"""The journal of a run as lines of text."""

from __future__ import annotations

from onnxq.passes.journal import Outcome, PassReport, Shortage, Shortened
from onnxq.report.terminal import format_seconds as duration


def describe_rewrite(report: PassReport) -> str:
    """A line for a rewrite that changed something."""
    more = f", … {len(report.changed)} in all" if len(report.changed) > 1 else ""
    return f"{report.name}: {report.changed[0]}{more}"


def describe_pass(report: PassReport) -> str:
    """A line for a pass: what it did and the figures of its trial, or why it was rolled back or left out."""
    return f"{report.name}: {_describe(report)}"


def _describe(report: PassReport) -> str:
    figures = "" if report.trial_db is None else f"{report.trial_db[0]:.1f} to {report.trial_db[1]:.1f} dB in a trial"
    change = "" if report.difference is None else f"max |difference| {report.difference:.3g}"
    if report.outcome is Outcome.KEPT:
        return ", ".join(part for part in (*report.changed[:1], change, figures) if part)
    if report.outcome is Outcome.NO_GAIN:
        return ": ".join(("nothing to gain", *report.changed[:1]))
    if report.outcome is Outcome.NOT_EQUIVALENT:
        return f"rolled back: it changed the float outputs, {change}"
    return f"rolled back: {figures}" if figures else "rolled back: a trial could not run"


def describe_shortage(one: Shortened) -> str:
    """A line for something that the budget of time cut short."""
    budget = f"budget of {duration(one.budget)}"
    if one.how is Shortage.GIVEN_UP:
        return f"budget: {one.name}: given up after its {duration(one.seconds)} of the {budget}"
    if one.how is Shortage.EXCEEDED:
        return f"budget: the {budget} was too small: {duration(one.seconds)} is the least it takes"
    short = f"the {budget} leaves no time for more"
    if one.how is Shortage.FEWER_SAMPLES:
        return f"budget: {one.name}: {one.samples[0]} of {one.samples[1]} samples, {short}"
    return f"budget: {one.name}: left out, {short}"
