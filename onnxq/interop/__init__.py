"""Results of other tools and of the torch front end read into plans: calibration caches, models with markers."""

from onnxq.interop.imported import Imported, MatchedSite, MissingSite, UnmatchedKind, UnusedLine
from onnxq.interop.markers import Marked, strip_markers
from onnxq.interop.matching import Findings, list_consumers, match_cache, set_scales
from onnxq.interop.trt_cache import ORIGIN, Cache, Entry, read_cache

__all__ = [
    "ORIGIN",
    "Cache",
    "Entry",
    "Findings",
    "Imported",
    "Marked",
    "MatchedSite",
    "MissingSite",
    "UnmatchedKind",
    "UnusedLine",
    "list_consumers",
    "match_cache",
    "read_cache",
    "set_scales",
    "strip_markers",
]
