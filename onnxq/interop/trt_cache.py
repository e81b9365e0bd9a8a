"""TensorRT's INT8 calibration cache, its text form: a header, then a scale for every tensor of the network.

    TRT-8601-EntropyCalibration2
    input: 3c010a14
    (Unnamed Layer* 12) [Constant]_output: 398109de

A scale is the dynamic range divided by 127, a float32 in big-endian hex; leading zeros may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import CalibrationError
from onnxq.files import read_input
from onnxq.plan import Plan
from onnxq.sites import Role

# Of the scales, in plans.
ORIGIN = "TensorRT calibration cache"
HEADER = "TRT-8601-EntropyCalibration2"

_HEADER = re.compile(r"TRT-[0-9A-Za-z.]+-\w+")
_HEX = re.compile(r"[0-9a-fA-F]{1,8}")
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
        raise CalibrationError(
            path, error.strerror or str(error), "name TensorRT's calibration cache", code="Q505"
        ) from error
    try:
        return parse_cache(data, source=str(path))
    except CalibrationError as error:
        raise error.name_file(path) from error


def parse_cache(data: bytes, *, source: str = "cache") -> Cache:
    """The content of a cache file; see `read_cache`."""
    lines = _decode_text(data, source).splitlines()
    # Blank lines in front of the header do no harm.
    number = next((k for k, line in enumerate(lines, 1) if line.strip()), 0)
    if not number:
        raise CalibrationError(source, "is empty", _AGAIN, code="Q505")
    header = lines[number - 1].strip()
    if not _HEADER.fullmatch(header):
        raise CalibrationError(
            f"{source}:{number}",
            f"{_shorten(header)} is no header like {HEADER!r}",
            "restore the first line of the file that TensorRT wrote, or name the right file",
            code="Q505",
            line=number,
        )
    _check_order(lines[number:], source)
    found = [_parse_entry(line, k) for k, line in enumerate(lines[number:], number + 1) if line.strip()]
    entries = [entry for entry in found if isinstance(entry, Entry)]
    faults = [fault for fault in found if isinstance(fault, str)]
    faults += _find_repeated(entries)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CalibrationError(
            source,
            "; ".join(faults[:_SHOWN]) + more,
            "mend these lines, or delete them: what then has no scale is listed",
            code="Q505",
        )
    if not entries:
        raise CalibrationError(source, "holds a header and no scales", _AGAIN, code="Q505")
    return Cache(source, header, tuple(entries))


_AGAIN = "calibrate with TensorRT again, or quantize with samples"


def write_cache(scales: Mapping[str, float | np.float32], *, header: str = HEADER) -> str:
    """The text of a cache with these scales by tensor name, float32 bit for bit.

    Raises CalibrationError for a scale that is not a finite number above 0 and for a name that no line can hold.
    """
    lines = [header]
    for name, scale in scales.items():
        value = np.float32(scale)
        if name != name.strip() or not name or len(name.splitlines()) != 1:
            raise CalibrationError(repr(name), "cannot stand in a calibration cache", "rename the tensor", code="Q505")
        if not (np.isfinite(value) and value > 0):
            raise CalibrationError(
                name, f"scale {value} is not a finite number above 0", "calibrate it again", code="Q505"
            )
        lines.append(f"{name}: {int(value.view(np.uint32)):08x}")
    return "\n".join(lines) + "\n"


def collect_scales(plan: Plan) -> dict[str, np.float32]:
    """The scales of a plan's symmetric activations by tensor name, for `write_cache`."""
    found: dict[str, np.float32] = {}
    for site in plan.sites:
        numbers = site.qparams
        if site.role in (Role.WEIGHT, Role.BIAS) or numbers is None or numbers.zero_point.any():
            continue
        found.setdefault(site.quantized_tensor.name, np.float32(numbers.scale))
    return found


def _decode_text(data: bytes, source: str) -> str:
    binary = "is binary; a calibration cache of TensorRT is text"
    fix = "ONNX Runtime's calibration.flatbuffers is another format: name the file that TensorRT's calibrator wrote"
    if b"\0" in data:
        raise CalibrationError(source, binary, fix, code="Q505")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(source, binary, fix, code="Q505") from error


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
        raise CalibrationError(
            source,
            "most of its scales make sense only with their bytes swapped",
            "write them big-endian, as TensorRT does: struct.pack('>f', scale).hex()",
            code="Q505",
        )


def _are_plausible(words: NDArray[np.uint32]) -> NDArray[np.bool_]:
    values = words.view(np.float32)
    low, high = _PLAUSIBLE
    with np.errstate(invalid="ignore"):
        return np.asarray((values > low) & (values < high))


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
