"""Work in pieces: done here, in processes or by Dask, and taken from an earlier run where it is finished already."""

from onnxq.workers.base import Workers, WorkPiece, count_threads, use_threads
from onnxq.workers.journal import Journal, pack_value, register_packed, restore_object, unpack_value

__all__ = [
    "Journal",
    "WorkPiece",
    "Workers",
    "count_threads",
    "pack_value",
    "register_packed",
    "restore_object",
    "unpack_value",
    "use_threads",
]
