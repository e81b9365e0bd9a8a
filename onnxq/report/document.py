"""Reports as one strict JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from onnxq.escapes import dump_json, replace_surrogates
from onnxq.report.model import UNCHANGED, Grade, Latency, Report, RunFigure, find_worst_figure, make_verdict
from onnxq.sites import Caution
from onnxq.wording import translate_text

# Version of the JSON that commands print; raised when a key changes its meaning or goes.
SCHEMA = 1


def to_json(value: Any) -> str:
    """Convert a report value to strict JSON: inf becomes "inf" or "-inf", nan null, other objects their text."""
    return dump_json(_to_plain(value)) + "\n"


def report_json(report: Report, error: Mapping[str, Any] | None = None) -> str:
    """Convert the report to JSON with its schema number and derived values.

    error: the reason, as plain values, if the command fails in spite of the report.
    """
    derived = {"roles": dict(report.roles), "slower": report.slower, "alarms": report.alarms()}
    derived["verdict"] = describe_verdict(report.figures, UNCHANGED if report.unchanged else None)
    return to_json({"schema": SCHEMA, "error": error, **_to_plain(report), **derived})


def describe_verdict(figures: Sequence[RunFigure], grade: Grade | None = None) -> dict[str, Any]:
    """The verdict on outputs. grade: in the place of theirs."""
    return {"grade": (grade or make_verdict(figures)[0]).name, "worst": find_worst_figure(figures)}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _to_plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, Caution):  # before str, of which it is a subclass
        return {"code": value.code, "text": _to_plain(str(value))}
    if isinstance(value, str):
        return replace_surrogates(translate_text(value))
    if value is None or isinstance(value, (bool, int)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
        return plain | ({"ratio": _to_plain(value.ratio)} if isinstance(value, Latency) else {})
    if isinstance(value, Mapping):
        return {replace_surrogates(str(key)): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    # numpy's scalars have `item`; anything else is shown as its text.
    return _to_plain(value.item()) if hasattr(value, "item") else str(value)
