"""The accuracy that somebody asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from onnxq.evaluation.metric import Drop, Metric
from onnxq.plan import Plan

FLOAT, UINT16 = "float", "uint16"


@dataclass(frozen=True, eq=False)
class AccuracyRequest:
    """min_sqnr in dB for every output, or a metric and its allowed drop; neither: only lost outputs are mended.

    float_value: the metric of the float model. to: the type that operators are promoted to, "float" or "uint16".
    """

    min_sqnr: float | None = None
    metric: Metric | None = None
    max_drop: Drop = field(default_factory=lambda: Drop(0.0))
    to: str = FLOAT
    float_value: float = math.nan

    @property
    def asked(self) -> bool:
        """True when somebody asked for something."""
        return self.min_sqnr is not None or self.metric is not None

    @property
    def unit(self) -> str:
        """The unit of its figures: "dB", or the metric's name."""
        return "dB" if self.metric is None else self.metric.name

    def describe(self) -> str:
        """The request in words; "" where there is none."""
        if self.metric is not None:
            return f"{self.metric.name} at most {self.max_drop} below float"
        return "" if self.min_sqnr is None else f"at least {self.min_sqnr:g} dB at every output"


def has_whole_bytes(plan: Plan) -> bool:
    """True when nothing has fewer than 8 bits: who asks for fewer knows the cost."""
    return all(site.spec.bits >= 8 for site in plan.sites)
