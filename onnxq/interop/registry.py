"""The formats that `import-calibration` reads. Another one is a file that defines it and a row here."""

from __future__ import annotations

from pathlib import Path

from onnxq.errors import CalibrationError
from onnxq.files import read_input
from onnxq.interop.base import ImportFormat, ScaleTable
from onnxq.interop.trt_cache import TENSORRT_CACHE

# The first one that recognizes a file reads it; a file that none recognizes gets the error of the first one.
FORMATS: tuple[ImportFormat, ...] = (TENSORRT_CACHE,)
# Bytes. A line stands for a tensor, and no network has a million.
_MOST_BYTES = 64 * 2**20


def read_scales(source: str | Path) -> ScaleTable:
    """Read the scales in a file.

    Raises CalibrationError, with line numbers, for a file of another kind and for scales that no engine can use.
    """
    path = Path(source)
    try:
        data = read_input(path, CalibrationError, limit=_MOST_BYTES, pipes=True)
    except OSError as error:
        cause = error.strerror or str(error)
        raise CalibrationError(path, cause, "name TensorRT's calibration cache", code="Q505") from error
    chosen = next((row for row in FORMATS if row.recognizes(data)), FORMATS[0])
    try:
        return chosen.parse(data, str(path))
    except CalibrationError as error:
        raise error.name_file(path) from error
