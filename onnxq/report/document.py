"""Reports as one strict JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from onnxq.files import readable
from onnxq.report.model import Latency, Report
from onnxq.sites import Caution
from onnxq.wording import phrase

SCHEMA = 1


def to_json(value: Any) -> str:
    """Any report value as strict JSON: inf becomes "inf" or "-inf", nan becomes null, other objects their text."""
    return json.dumps(_plain(value), indent=1, allow_nan=False) + "\n"


def report_json(report: Report, error: Mapping[str, Any] | None = None) -> str:
    """The report with its schema number and the values derived from others.

    error: why the command fails though there is a report, as plain values.
    """
    derived = {"roles": dict(report.roles), "slower": report.slower, "alarms": report.alarms()}
    return to_json({"schema": SCHEMA, "error": error, **_plain(report), **derived})


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, Caution):
        return {"code": value.code, "text": _plain(str(value))}
    if isinstance(value, str):
        return readable(phrase(value))
    if value is None or isinstance(value, (bool, int)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return plain | ({"ratio": _plain(value.ratio)} if isinstance(value, Latency) else {})
    if isinstance(value, Mapping):
        return {readable(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return _plain(value.item()) if hasattr(value, "item") else str(value)
