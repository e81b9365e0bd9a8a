"""TensorRT's scales: its INT8 calibration cache, and dynamic ranges in JSON.

    TRT-8601-EntropyCalibration2
    input: 3c010a14
    (Unnamed Layer* 12) [Constant]_output: 398109de

The cache is text, a header, then a scale for every tensor of the network. A scale is the dynamic range divided by 127,
a float32 in big-endian hex; leading zeros may be missing. Tensors that TensorRT folds away, or that held zeros alone,
have 0. Ranges are the largest magnitude of each tensor, 127 times its scale.

    {"act_quant_info": {name: range}}           PPQ
    {"tensorrt": {"blob_range": {name: range}}} MQBench; Dipoorlet without the outer object
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.arrays import Mask
from onnxq.errors import CalibrationError
from onnxq.files import find_calibrator
from onnxq.interop.base import (
    ImportFormat,
    ScaleTable,
    TensorScale,
    UnusedLine,
    make_entry,
    open_table,
    refuse_non_int8,
    write_table,
)

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
# Bytes in which the header stands.
_BEGINNING = 4096
# Faults listed in an error.
_SHOWN = 5
# Names that TensorRT gives to tensors of layers without an ONNX node.
_OWN_NAMES = re.compile(r"\(Unnamed (Layer|ITensor)\* \d+\)")
# Scales outside these bounds do not occur; with swapped bytes nearly all are outside.
_PLAUSIBLE = (1e-12, 1e12)


def parse_cache(data: bytes, source: str = "cache") -> ScaleTable:
    """The content of a cache file. Raises CalibrationError with the numbers of wrong lines."""
    text = _decode_text(data, source)
    if find_calibrator(text) == _OTHER:
        raise _fault(
            source, f"is a calibration table of {_OTHER}, and no cache of TensorRT", _SAMPLES
        )
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
    entries = []
    skipped = []
    faults = []
    for k, line in enumerate(lines[number:], number + 1):
        if line.strip():
            try:
                entry = _parse_entry(line, k)
            except ValueError as error:
                faults.append(f"line {k}: {error}")
                continue
            # No pair has a scale of 0, and nothing reads the values of such a tensor.
            if entry.scale:
                entries.append(entry)
            else:
                reason = "a scale of 0, as of a tensor without values"
                skipped.append(UnusedLine(name=entry.name, line=k, reason=reason))
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
    return ScaleTable(
        source=source,
        header=header,
        entries=tuple(entries),
        tool="TensorRT",
        origin=ORIGIN,
        own_names=_OWN_NAMES,
        skipped=tuple(skipped),
    )


def write_cache(entries: Sequence[TensorScale]) -> bytes:
    """A cache file with these scales, float32 bit for bit."""
    lines = [
        f"{entry.name}: {int(np.float32(entry.scale).view(np.uint32)):08x}" for entry in entries
    ]
    return "\n".join([HEADER, *lines, ""]).encode()


def _refuse_entry(entry: TensorScale) -> str:
    """Why the text has no place for an entry: names are what stands in front of the last colon of a line."""
    plain = entry.name == entry.name.strip() and len(entry.name.splitlines()) == 1
    return refuse_non_int8(entry) or (
        "" if plain else "a name with a line end, or blanks around it"
    )


TENSORRT_CACHE = ImportFormat(
    "tensorrt-cache",
    lambda data: find_calibrator(data[:_BEGINNING].decode("utf-8-sig", "replace")) == "TensorRT",
    parse_cache,
    write_cache,
    _refuse_entry,
    "TensorRT up to 10",
    "a first line as `TRT-8601-EntropyCalibration2`",
    "all but symmetric int8 activations",
)


def _decode_text(data: bytes, source: str) -> str:
    binary = "is binary; a calibration cache of TensorRT is text"
    fix = f"{_OTHER}'s calibration.flatbuffers is another format: name the file that TensorRT's calibrator wrote"
    if b"\0" in data:
        raise _fault(source, binary, fix)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _fault(source, binary, fix) from error


def _parse_entry(line: str, number: int) -> TensorScale:
    """The entry of a line. Raises ValueError with its fault."""
    # Names hold colons and blanks ("onnx::MatMul_12"), scales do not: the last colon separates them.
    name, colon, digits = line.strip().rpartition(":")
    name = name.strip()
    digits = digits.strip()
    if not colon or not name:
        raise ValueError(f"{_shorten(line.strip())} is not `tensor: scale`")
    if not _HEX.fullmatch(digits):
        raise ValueError(f"{_shorten(digits)} of {name} is not a float32 in 8 hex digits")
    scale = np.uint32(int(digits, 16)).view(np.float32)
    if scale >= 0 and np.isfinite(scale):
        return TensorScale(name, scale, number)
    if np.isnan(scale):
        raise ValueError(f"the scale of {name} is not a number")
    raise ValueError(f"the scale of {name} is {'infinite' if scale > 0 else 'negative'}")


def _find_repeated(entries: list[TensorScale]) -> Iterator[str]:
    """The faults of tensors that stand in two lines."""
    first: dict[str, int] = {}
    for entry in entries:
        if first.setdefault(entry.name, entry.line) != entry.line:
            yield f"line {entry.line}: {entry.name} stands in line {first[entry.name]} already"


def _check_order(lines: list[str], source: str) -> None:
    """Raise CalibrationError for a cache with swapped bytes, as some scripts write them."""
    digits = [line.rpartition(":")[2].strip() for line in lines if line.strip()]
    words = np.array([int(word, 16) for word in digits if _HEX.fullmatch(word)], np.uint32)
    absurd = ~_are_plausible(words)
    likely = _are_plausible(words.byteswap())
    # More than half: a few implausible scales may also be right as they are.
    if (absurd & likely).sum() * 2 > len(digits):
        raise _fault(
            source,
            "most of its scales make sense only with their bytes swapped",
            "write them big-endian, as TensorRT does: struct.pack('>f', scale).hex()",
        )


def _are_plausible(words: NDArray[np.uint32]) -> Mask:
    values = words.view(np.float32)
    low, high = _PLAUSIBLE
    with np.errstate(invalid="ignore"):
        return np.asarray((values > low) & (values < high))


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# Of symmetric int8.
_STEPS = 127
_KEYS = ("act_quant_info", "blob_range")


def _parse_ranges(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, "TensorRT", "dynamic ranges")
    inner = table.root.get("tensorrt")
    root = inner if isinstance(inner, Mapping) else table.root
    # Of an empty file the message names PPQ's key.
    key = next((key for key in _KEYS if key in root), _KEYS[0])
    path = ("tensorrt", key) if root is inner else (key,)
    for name, value in (root.get(key) or {}).items():
        table.add_entry((*path, name), name, partial(_read_range, name, value))
    return replace(table.make_table(key), only_int8=True)


def _read_range(name: str, value: Any, line: int) -> TensorScale:
    return make_entry(name, line, (float(value) / _STEPS, 0), bits=8, signed=True)


def _write_ranges(entries: Sequence[TensorScale]) -> bytes:
    # Products of a float32 and 127 are exact in float64, so that the scales come back to the bit.
    return write_table(
        {_KEYS[0]: {entry.name: float(np.asarray(entry.scale)) * _STEPS for entry in entries}}
    )


def _recognize_ranges(data: bytes) -> bool:
    return any(f'"{key}"'.encode() in data for key in _KEYS)


TENSORRT_RANGES = ImportFormat(
    "tensorrt-ranges",
    _recognize_ranges,
    _parse_ranges,
    _write_ranges,
    title="TensorRT, PPQ, MQBench, Dipoorlet",
    mark="`act_quant_info` or `blob_range`",
    limits="all but symmetric int8 activations",
)
