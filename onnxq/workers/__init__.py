"""Work in pieces: done here, in processes or by Dask, and taken from an earlier run where it is finished already."""

from onnxq.workers.base import (
    Journal,
    Workers,
    WorkPiece,
    count_threads,
    pack_value,
    read_value,
    register_packed,
    restore_object,
    unpack_value,
    use_threads,
    write_value,
)

__all__ = [
    "Journal",
    "WorkPiece",
    "Workers",
    "count_threads",
    "pack_value",
    "read_value",
    "register_packed",
    "restore_object",
    "unpack_value",
    "use_threads",
    "write_value",
]
