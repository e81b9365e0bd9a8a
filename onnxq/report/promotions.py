"""What was promoted to a wider type so that a wish holds, as frozen values and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from onnxq.report.terminal import decibel, table


@dataclass(frozen=True, kw_only=True)
class PromotionStep:
    """One promotion. nodes: operators that compute in float from then on. before, after: the figure it was made for."""

    name: str
    to: str
    nodes: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """asked: the wish in words. unit: "dB", or the metric's name; float_value: the float model's metric.

    least: the figure asked for. met: by `value`, measured on the finished model: for dB on samples nothing was chosen
    on. operators: how many were promoted, left: how many stayed. samples: those that the steps were judged on. note:
    why it stopped, where the wish does not hold. part: the slices of an output that `value` is of, like
    "output0[:, 4:, :]", "" where it is of a whole output.
    """

    asked: str
    unit: str
    met: bool
    value: float
    least: float
    steps: tuple[PromotionStep, ...] = ()
    operators: int = 0
    left: int = 0
    float_value: float = math.nan
    samples: int = 0
    note: str = ""
    part: str = ""

    def said(self, value: float) -> str:
        """A figure of the wish's kind."""
        return decibel(value) if self.unit == "dB" else f"{value:.4g}"

    def line(self) -> str:
        """The outcome in a sentence."""
        done = f"{self.operators} operators" if self.operators != 1 else "1 operator"
        held = "holds" if self.met else "does NOT hold"
        tail = f"; {self.note}" if self.note else ""
        whole = "" if math.isnan(self.float_value) else f" (float {self.said(self.float_value)})"
        whole = f" at {self.part}" if self.part else whole
        became = f"{done} of {self.operators + self.left} promoted" if self.steps else "nothing had to be promoted"
        if not self.steps and not self.met:
            became = "nothing was promoted"
        return f"{self.asked}: {held} with {self.said(self.value)}{whole}; {became}{tail}"


def promotion_rows(found: Promotion) -> RenderableType:
    """The outcome and a row for each step."""
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
