"""Results of other tools and of the torch front end read into plans: tables of scales, models with markers."""

from onnxq.interop.base import ImportFormat, ScaleTable, TensorScale
from onnxq.interop.checkpoints import Checkpoint, CheckpointWeight, InputScale, WeightCodes, open_checkpoint
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
from onnxq.interop.weights import FoundWeight, WeightMatch, match_weights

__all__ = [
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
    "WeightMatch",
    "list_consumers",
    "match_scales",
    "match_weights",
    "open_checkpoint",
    "read_scales",
    "set_scales",
    "strip_markers",
]
