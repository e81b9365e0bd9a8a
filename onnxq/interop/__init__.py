"""Results of other tools and of the torch front end read into plans: tables of scales, models with markers."""

from onnxq.interop.base import ImportFormat, ScaleTable, TensorScale, make_entry, sort_by_name
from onnxq.interop.checkpoints import (
    Checkpoint,
    CheckpointWeight,
    InputScale,
    WeightCodes,
    open_checkpoint,
)
from onnxq.interop.fitting import make_rules
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
from onnxq.interop.registry import FORMATS, find_format, read_scales
from onnxq.interop.weights import FoundWeight, match_weights

__all__ = [
    "FORMATS",
    "Checkpoint",
    "CheckpointWeight",
    "FoundWeight",
    "ImportFormat",
    "Imported",
    "InputScale",
    "Marked",
    "MatchedSite",
    "MissingSite",
    "ScaleMatch",
    "ScaleTable",
    "TensorScale",
    "UnmatchedKind",
    "UnusedLine",
    "WeightCodes",
    "find_format",
    "list_consumers",
    "make_entry",
    "make_rules",
    "match_scales",
    "match_weights",
    "open_checkpoint",
    "read_scales",
    "set_scales",
    "sort_by_name",
    "strip_markers",
]
