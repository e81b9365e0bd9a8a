"""Output for people: tables, JSON and progress, made from typed results and never from a graph."""

from onnxq.report.columns import Text
from onnxq.report.document import ErrorValues, ResultFormat, Values, pick_fields
from onnxq.report.model import Report, make_verdict, warn_synthetic
from onnxq.report.terminal import (
    Parts,
    RenderableType,
    TextView,
    format_count,
    make_list,
    make_sheet,
    make_table,
)

__all__ = [
    "ErrorValues",
    "Parts",
    "RenderableType",
    "Report",
    "ResultFormat",
    "Text",
    "TextView",
    "Values",
    "format_count",
    "make_list",
    "make_sheet",
    "make_table",
    "make_verdict",
    "pick_fields",
    "warn_synthetic",
]
