"""Plan to JSON and back without loss; a person can read and edit the text. Its keys are the fields of `Plan`."""

from __future__ import annotations

import json
from pathlib import Path as FilePath

from onnxq.config import Frozen
from onnxq.config.rows import read_fields, write_fields
from onnxq.config.schema import JsonText, SchemaNumber, shorten_value
from onnxq.errors import PlanError
from onnxq.escapes import escape_json
from onnxq.files import find_calibrator
from onnxq.plan.model import SCHEMA, Plan

# By the tool that wrote a calibration file.
_CALIBRATIONS = {
    "TensorRT": "`onnxq import-calibration` makes a plan of it",
    "ONNX Runtime": "give `quantize` the samples that it was made of: it finds ranges of its own",
}
_WRITE = "write it with `onnxq plan`"
_FRESH = "compare with a fresh `onnxq plan`"


class _PlanFile(Frozen):
    version: SchemaNumber


def to_json(plan: Plan) -> str:
    """The plan as JSON text; equal plans give equal bytes."""
    return escape_json(json.dumps({"schema": plan.schema, **write_fields(plan)}, indent=1, ensure_ascii=False)) + "\n"


def from_json(text: str, *, source: str | FilePath = "plan") -> Plan:
    """The plan of JSON text.

    source: the file it was read from, or a name for text from elsewhere.
    Raises PlanError naming the line and the entry at fault.
    """
    try:
        return _read_plan(text, str(source))
    except PlanError as error:
        if isinstance(source, FilePath):
            raise error.name_file(source) from error
        raise


def _read_plan(text: str, source: str) -> Plan:
    # Some editors save UTF-8 with a byte order mark.
    read = JsonText(source, text.removeprefix("\ufeff"))
    if tool := find_calibrator(text):
        raise PlanError(source, f"is a calibration file of {tool}, and no plan", _CALIBRATIONS[tool], code="Q401")
    raw = read.parse(PlanError, _WRITE, code="Q401")
    if not isinstance(raw, dict) or "schema" not in raw:
        raise PlanError(source, "not a plan: no `schema`", _WRITE, code="Q401")
    # Before the rest: a file of another version has other keys, and telling of those would mislead.
    if raw["schema"] != SCHEMA:
        cause = f"plan schema {shorten_value(raw['schema'])}, this onnxq reads {SCHEMA}"
        raise PlanError(source, cause, "plan the model again", code="Q401")
    return read_fields(read, Plan, PlanError, _FRESH, code="Q403", base=_PlanFile)
