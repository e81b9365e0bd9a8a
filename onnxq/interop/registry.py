"""The formats that `import-calibration` reads and `export-calibration` writes.

Another one is a file that defines it and a row here.
"""

from dataclasses import replace
from pathlib import Path

from onnxq.errors import CalibrationError, suggest_names
from onnxq.files import AnyPath, describe_os_error, read_input
from onnxq.interop.aimet import AIMET_0, AIMET_1, AIMET_2_0, AIMET_2_1
from onnxq.interop.base import MALFORMED, ImportFormat, ScaleTable
from onnxq.interop.overrides import OVERRIDES
from onnxq.interop.ppq import PPQ
from onnxq.interop.tensorrt import TENSORRT_CACHE, TENSORRT_RANGES

# The first one that recognizes a file reads it; a file that none recognizes gets the error of the first one.
FORMATS = (
    TENSORRT_CACHE,
    TENSORRT_RANGES,
    AIMET_0,
    AIMET_1,
    AIMET_2_0,
    AIMET_2_1,
    PPQ,
    OVERRIDES,
)
# Bytes. A line stands for a tensor, and no network has a million.
_MOST_BYTES = 64 * 2**20
# How files of torch.save and of pickle begin: PPQ's .native, Sparsebit's .pt.
_PICKLED = (b"PK\x03\x04", b"\x80")


def find_format(name: str) -> ImportFormat:
    """The format of this name. Raises CalibrationError, with the nearest names, where there is none."""
    by_name = {row.name: row for row in FORMATS}
    if name not in by_name:
        fix = suggest_names(name, by_name)
        raise CalibrationError(f"format {name!r}", "is not known", fix, code="Q516")
    return by_name[name]


def read_scales(source: AnyPath, kind: str = "") -> ScaleTable:
    """Read the scales in a file. kind: name of its format; "": the one that recognizes it.

    Raises CalibrationError, with line numbers, for a file of another kind and for scales that no engine can use.
    """
    path = Path(source)
    named = find_format(kind) if kind else None
    try:
        data = read_input(path, CalibrationError, limit=_MOST_BYTES, pipes=True)
    except OSError as error:
        cause = describe_os_error(error)
        raise CalibrationError(
            path, cause, "name the file that the tool wrote", code="Q505"
        ) from error
    if data.startswith(_PICKLED):
        fix = "export it from the tool: PPQ writes ONNX and JSON, Sparsebit ONNX with the attribute `bits`, torch ONNX"
        raise CalibrationError(
            path, "is a Python pickle, which runs code when it is read", fix, code="Q505"
        )
    chosen = named or next((row for row in FORMATS if row.recognizes(data)), None)
    # The first format reads text of any kind, and would tell of a header that JSON never has.
    if chosen is None and data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        cause = f"is JSON of none of the formats {', '.join(row.name for row in FORMATS[1:])}"
        raise CalibrationError(
            path, cause, "name the file that the tool wrote, or its format: `kind=…`", code="Q505"
        )
    chosen = chosen or FORMATS[0]
    try:
        return replace(chosen.parse(data, str(path)), kind=chosen.name)
    except CalibrationError as error:
        raise error.name_file(path) from error
    except MALFORMED as error:
        cause = f"is built otherwise than files of format {chosen.name}: {error}"
        raise CalibrationError(path, cause, "write it with the tool again", code="Q505") from error
