"""Results of other tools and of the torch front end read into plans: tables of scales, models with markers."""

from onnxq.interop.base import ImportFormat, ScaleTable, TensorScale, sort_by_name
from onnxq.interop.checkpoints import WeightCodes, open_checkpoint
from onnxq.interop.exporting import ExportedScales
from onnxq.interop.fitting import make_rules
from onnxq.interop.markers import Marked, strip_markers
from onnxq.interop.matching import Imported, MatchedSite, MissingSite, UnmatchedKind, UnusedLine
from onnxq.interop.registry import FORMATS, find_format, read_scales
from onnxq.interop.weights import FoundWeight, match_weights

__all__ = [
    "FORMATS",
    "ExportedScales",
    "FoundWeight",
    "ImportFormat",
    "Imported",
    "Marked",
    "MatchedSite",
    "MissingSite",
    "ScaleTable",
    "TensorScale",
    "UnmatchedKind",
    "UnusedLine",
    "WeightCodes",
    "find_format",
    "make_rules",
    "match_weights",
    "open_checkpoint",
    "read_scales",
    "sort_by_name",
    "strip_markers",
]
