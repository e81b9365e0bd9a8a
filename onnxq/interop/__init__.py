"""Scales that other tools found, read into our plans."""

from onnxq.interop.imported import Absent, Imported, Left, Matched, Why
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
    "Matched",
    "Why",
    "cache_of",
    "consumers_of",
    "match",
    "read_cache",
    "with_scales",
    "write_cache",
]
