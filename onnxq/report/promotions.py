"""Promotions to wider types for a requested accuracy, as frozen values and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from onnxq.report.terminal import decibel, table


@dataclass(frozen=True, kw_only=True)
class PromotionStep:
    """One promotion."""

    name: str
    # The new type.
    to: str
    # Operators that compute in float from then on.
    nodes: tuple[str, ...]
    # The requested figure before and after it.
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The outcome of a requested accuracy."""

    # The request in words.
    asked: str
    # "dB", or the name of the metric.
    unit: str
    # `value` is at least `least`.
    met: bool
    # Measured on the finished model; for dB on samples on which nothing was chosen.
    value: float
    least: float
    steps: tuple[PromotionStep, ...] = ()
    # Number of operators promoted, and of those left.
    operators: int = 0
    left: int = 0
    # The float model's metric.
    float_value: float = math.nan
    # Number of samples on which the steps were judged.
    samples: int = 0
    # Why it stopped, if the request is not met.
    note: str = ""

    def said(self, value: float) -> str:
        """Format a figure of the requested kind."""
        return decibel(value) if self.unit == "dB" else f"{value:.4g}"

    def line(self) -> str:
        """Format the outcome as a sentence."""
        done = f"{self.operators} operators" if self.operators != 1 else "1 operator"
        held = "holds" if self.met else "does NOT hold"
        tail = f"; {self.note}" if self.note else ""
        whole = "" if math.isnan(self.float_value) else f" (float {self.said(self.float_value)})"
        became = f"{done} of {self.operators + self.left} promoted" if self.steps else "nothing had to be promoted"
        if not self.steps and not self.met:
            became = "nothing was promoted"
        return f"{self.asked}: {held} with {self.said(self.value)}{whole}; {became}{tail}"


def promotion_rows(found: Promotion) -> RenderableType:
    """Make the outcome and a row for each step."""
    style = "" if found.met else "bold red"
    if not found.steps:
        return Text(found.line(), style=style)
    rows = (
        (one.name, one.to, str(len(one.nodes)), found.said(one.before), found.said(one.after)) for one in found.steps
    )
    where = f"before and after on {found.samples} samples kept for choosing" if found.samples else ""
    made = table(
        ("site", "to", "operators", "before", "after"), rows, right=("operators", "before", "after"), names=("site",)
    )
    return Group(Text(found.line(), style=style), made, Text(where, style="dim"))
