"""Reading untrusted inputs: endless or oversized files are refused with a message."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from onnxq.errors import OnnxqError
from onnxq.files.outputs import register_input

MIB = 2**20
# Bytes. A pipe or device may have no end; text files that people or scripts write are far smaller.
_FROM_A_PIPE = 64 * MIB
# Calibration files of other tools, which are taken for plans and for each other. ONNX Runtime writes its table as JSON
# and as lines of a tensor and a number.
_CALIBRATIONS = {
    "TensorRT": re.compile(r"\s*TRT-[0-9A-Za-z.]+-\w+\s*$", re.MULTILINE),
    "ONNX Runtime": re.compile(r'\s*(\{\s*"CLS": "TensorsData"|(\S+ [-+.e\d]+\s*)+\Z)'),
}


def read_input(path: str | Path, error: type[OnnxqError], *, limit: int, pipes: bool = False) -> bytes:
    """Read an input file of at most `limit` bytes.

    error: the class to raise for larger files, and for devices and pipes. pipes: read them as well.
    Raises OSError as `open` does.
    """
    check_input_kind(path, error, pipes=pipes)
    found = os.stat(path)
    size, regular = found.st_size, stat.S_ISREG(found.st_mode)
    limit = limit if regular else min(limit, _FROM_A_PIPE)
    with open(path, "rb") as file:
        # One byte more than allowed shows that a stream is too long, without reading it to its end.
        data = b"" if size > limit else file.read() if regular else file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise error(str(path), f"is larger than {limit // MIB} MiB", "name the right file")
    return data


def read_text(path: str | Path, error: type[OnnxqError], fix: str, *, limit: int = 64 * MIB, code: str = "") -> str:
    """Read the text of a file or pipe, without a byte order mark. Raises `error` (fix, code) if that fails."""
    try:
        return read_input(path, error, limit=limit, pipes=True).decode("utf-8-sig")
    except UnicodeDecodeError as found:
        raise error(Path(path), "is not a text file", fix, code=code) from found
    except (OSError, ValueError) as found:  # ValueError: a name with a NUL in it
        subject = repr(str(path)) if "\0" in str(path) else Path(path)
        raise error(subject, describe_os_error(found), fix, code=code) from found


def find_calibrator(text: str) -> str:
    """The tool that wrote a calibration file, "TensorRT" or "ONNX Runtime"; "" for other text."""
    return next((tool for tool, form in _CALIBRATIONS.items() if form.match(text)), "")


def describe_os_error(error: Exception) -> str:
    """Return the system's reason, "No such file or directory", without error number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def shorten_error(error: Exception) -> str:
    """Return the first line of a message, at most 200 characters; the class name for an empty message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_input_kind(path: str | Path, error: type[OnnxqError], *, pipes: bool = False) -> None:
    """Raise `error` for a device or (unless pipes) a pipe, OutputError for an output of the running command.

    Raises OSError for a path that does not exist.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        register_input(path)
    elif stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not pipes):
        raise error(str(path), "is a device, not a file", "name a file")
    elif not pipes:
        raise error(str(path), "is a pipe, and is read more than once", "write it to a file first, and name that")
