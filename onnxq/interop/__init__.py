"""Results of other tools and of the torch front end read into plans: calibration caches, models with markers."""

from onnxq.interop.imported import Absent, Imported, Left, Matched, Why
from onnxq.interop.markers import Marked, strip_markers
from onnxq.interop.matching import Findings, consumers_of, match, with_scales
from onnxq.interop.trt_cache import ORIGIN, Cache, Entry, cache_of, read_cache, write_cache

__all__ = [
    "ORIGIN",
    "Absent",
    "Cache",
    "Entry",
    "Findings",
    "Imported",
    "Left",
    "Marked",
    "Matched",
    "Why",
    "cache_of",
    "consumers_of",
    "match",
    "read_cache",
    "strip_markers",
    "with_scales",
    "write_cache",
]
