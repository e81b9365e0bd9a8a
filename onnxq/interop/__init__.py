"""Results of other tools and of the torch front end read into plans: tables of scales, models with markers."""

from onnxq.interop.base import ImportFormat, ScaleTable, TensorScale, sort_by_name
from onnxq.interop.exporting import ExportedScales
from onnxq.interop.fitting import make_rules
from onnxq.interop.markers import Marked, strip_markers
from onnxq.interop.matching import Imported
from onnxq.interop.registry import find_format, read_scales
from onnxq.interop.weights import FoundWeight, match_weights

__all__ = [
    "ExportedScales",
    "FoundWeight",
    "ImportFormat",
    "Imported",
    "Marked",
    "ScaleTable",
    "TensorScale",
    "find_format",
    "make_rules",
    "match_weights",
    "read_scales",
    "sort_by_name",
    "strip_markers",
]
