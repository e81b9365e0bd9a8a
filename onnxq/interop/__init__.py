"""Results of other tools and of the torch front end read into plans: tables of scales, models with markers."""

from onnxq.interop.base import ImportFormat, ScaleTable, TensorScale
from onnxq.interop.markers import Marked, strip_markers
from onnxq.interop.matching import (
    Imported,
    MatchedSite,
    MissingSite,
    ScaleMatch,
    UnmatchedKind,
    UnusedLine,
    list_consumers,
    match_scales,
    set_scales,
)
from onnxq.interop.registry import read_scales

__all__ = [
    "ImportFormat",
    "Imported",
    "Marked",
    "MatchedSite",
    "MissingSite",
    "ScaleMatch",
    "ScaleTable",
    "TensorScale",
    "UnmatchedKind",
    "UnusedLine",
    "list_consumers",
    "match_scales",
    "read_scales",
    "set_scales",
    "strip_markers",
]
