"""TensorRT's INT8 calibration cache, its text form: a header, then a scale for every tensor of the network.

    TRT-8601-EntropyCalibration2
    input: 3c010a14
    (Unnamed Layer* 12) [Constant]_output: 398109de

A scale is the dynamic range divided by 127, a float32 in big-endian hex; leading zeros may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import CalibrationError
from onnxq.files import find_calibrator, read_input

# Of the scales, in plans.
ORIGIN = "TensorRT calibration cache"
HEADER = "TRT-8601-EntropyCalibration2"

_HEADER = re.compile(r"TRT-[0-9A-Za-z.]+-\w+")
_HEX = re.compile(r"[0-9a-fA-F]{1,8}")
_fault = partial(CalibrationError, code="Q505")
_AGAIN = "calibrate with TensorRT again, or quantize with samples"
# The tool whose tables are taken for caches.
_OTHER = "ONNX Runtime"
_SAMPLES = "give `quantize` the samples that it was made of: it finds ranges of its own"
# Faults listed in an error.
_SHOWN = 5
# Bytes. A line stands for a tensor, and no network has a million.
_MOST_BYTES = 64 * 2**20
# Scales outside these bounds do not occur; with swapped bytes nearly all are outside.
_PLAUSIBLE = (1e-12, 1e12)


@dataclass(frozen=True)
class Entry:
    """One line: a tensor of TensorRT's network and its scale."""

    name: str
    scale: np.float32
    line: int


@dataclass(frozen=True)
class Cache:
    """The content of a cache file. header: TensorRT's version and the calibrator, e.g. "TRT-8601-…"."""

    source: str
    header: str
    entries: tuple[Entry, ...]


def read_cache(source: str | Path) -> Cache:
    """Read a cache file.

    Raises CalibrationError, with line numbers, for a file that is no cache and for scales that no engine can use.
    """
    path = Path(source)
    try:
        data = read_input(path, CalibrationError, limit=_MOST_BYTES, pipes=True)
    except OSError as error:
        raise _fault(path, error.strerror or str(error), "name TensorRT's calibration cache") from error
    try:
        return parse_cache(data, source=str(path))
    except CalibrationError as error:
        raise error.name_file(path) from error


def parse_cache(data: bytes, *, source: str = "cache") -> Cache:
    """The content of a cache file; see `read_cache`."""
    text = _decode_text(data, source)
    if find_calibrator(text) == _OTHER:
        raise _fault(source, f"is a calibration table of {_OTHER}, and no cache of TensorRT", _SAMPLES)
    lines = text.splitlines()
    # Blank lines in front of the header do no harm.
    number = next((k for k, line in enumerate(lines, 1) if line.strip()), 0)
    if not number:
        raise _fault(source, "is empty", _AGAIN)
    header = lines[number - 1].strip()
    if not _HEADER.fullmatch(header):
        cause = f"{_shorten(header)} is no header like {HEADER!r}"
        fix = "restore the first line of the file that TensorRT wrote, or name the right file"
        raise _fault(f"{source}:{number}", cause, fix, line=number)
    _check_order(lines[number:], source)
    found = [_parse_entry(line, k) for k, line in enumerate(lines[number:], number + 1) if line.strip()]
    entries = [entry for entry in found if isinstance(entry, Entry)]
    faults = [fault for fault in found if isinstance(fault, str)]
    faults += _find_repeated(entries)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise _fault(
            source,
            "; ".join(faults[:_SHOWN]) + more,
            "mend these lines, or delete them: what then has no scale is listed",
        )
    if not entries:
        raise _fault(source, "holds a header and no scales", _AGAIN)
    return Cache(source, header, tuple(entries))


def _decode_text(data: bytes, source: str) -> str:
    binary = "is binary; a calibration cache of TensorRT is text"
    fix = f"{_OTHER}'s calibration.flatbuffers is another format: name the file that TensorRT's calibrator wrote"
    if b"\0" in data:
        raise _fault(source, binary, fix)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _fault(source, binary, fix) from error


def _parse_entry(line: str, number: int) -> Entry | str:
    """The entry of a line, or its fault as text."""
    # Names hold colons and blanks ("onnx::MatMul_12"), scales do not: the last colon separates them.
    name, colon, digits = line.strip().rpartition(":")
    name, digits = name.strip(), digits.strip()
    if not colon or not name:
        return f"line {number}: {_shorten(line.strip())} is not `tensor: scale`"
    if not _HEX.fullmatch(digits):
        return f"line {number}: {_shorten(digits)} of {name} is not a float32 in 8 hex digits"
    scale = np.uint32(int(digits, 16)).view(np.float32)
    if np.isnan(scale) or np.isinf(scale) or scale <= 0:
        what = "0" if scale == 0 else "not a number" if np.isnan(scale) else "infinite" if scale > 0 else "negative"
        return f"line {number}: the scale of {name} is {what}"
    return Entry(name, scale, number)


def _find_repeated(entries: list[Entry]) -> Iterator[str]:
    """The faults of tensors that stand in two lines."""
    first: dict[str, int] = {}
    for entry in entries:
        if first.setdefault(entry.name, entry.line) != entry.line:
            yield f"line {entry.line}: {entry.name} stands in line {first[entry.name]} already"


def _check_order(lines: list[str], source: str) -> None:
    """Raise CalibrationError for a cache with swapped bytes, as some scripts write them."""
    digits = [line.rpartition(":")[2].strip() for line in lines if line.strip()]
    words = np.array([int(one, 16) for one in digits if _HEX.fullmatch(one)], np.uint32)
    absurd, likely = ~_are_plausible(words), _are_plausible(words.byteswap())
    # More than half: a few implausible scales may also be right as they are.
    if (absurd & likely).sum() * 2 > len(digits):
        raise _fault(
            source,
            "most of its scales make sense only with their bytes swapped",
            "write them big-endian, as TensorRT does: struct.pack('>f', scale).hex()",
        )


def _are_plausible(words: NDArray[np.uint32]) -> NDArray[np.bool_]:
    values = words.view(np.float32)
    low, high = _PLAUSIBLE
    with np.errstate(invalid="ignore"):
        return np.asarray((values > low) & (values < high))


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
