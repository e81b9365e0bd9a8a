"""Formats of files with scales by tensor, as other tools write them, and the content of such a file, in JSON or not."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxq.arrays import are_scales, as_float32, as_float64, as_int32, cast_quietly, unwrap_single
from onnxq.config.schema import JsonText, find_line
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import JsonObject, Names, Role
from onnxq.spec import Granularity, PerTensor, QParams, QuantSpec
from onnxq.wording import Word

_INT8 = QuantSpec()
_ONE_SCALE = PerTensor()


@dataclass(frozen=True)
class TensorScale:
    """A tensor of the network that was calibrated, with its numbers; by default those of symmetric int8.

    line: its line in the file, or its position where a file has no lines. scale, zero_point: arrays of the shape of the
    spec's granularity; its axis is -1 where the format names none. readers: the nodes that read these values where
    others read other ones; (): all that read the tensor.
    """

    name: str
    scale: Any
    line: int = 0
    zero_point: Any = 0
    spec: QuantSpec = _INT8
    role: Role = Role.ACTIVATION
    readers: Names = ()

    @property
    def span(self) -> float:
        """The width of the range that it covers."""
        return float(np.max(self.scale)) * (self.spec.qmax - self.spec.qmin)

    def make_qparams(self, origin: str) -> QParams:
        """The numbers, as plans have them."""
        scale = as_float32(self.scale)
        return QParams(
            scale,
            np.broadcast_to(as_int32(self.zero_point), scale.shape).copy(),
            origin,
        )


TensorScales = tuple[TensorScale, ...]


class UnmatchedKind(Word):
    """Why a name of the file is no tensor of the prepared model."""

    FOLDED = "folded"  # the model has it; preparation fused it into another
    TENSORRT = "tensorrt"  # a layer that TensorRT added and named itself
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class UnusedLine:
    """A line that no site took."""

    name: str
    line: int
    # None for a tensor of the prepared model, which the plan does not quantize.
    why: UnmatchedKind | None = None
    reason: str = ""
    # For unknown names, the nearest of the model.
    nearest: Names = ()


UnusedLines = tuple[UnusedLine, ...]


@dataclass(frozen=True, kw_only=True)
class ScaleTable:
    """The content of a file. header: what the tool says of itself there, such as "TRT-8601-EntropyCalibration2"."""

    source: str
    header: str
    entries: TensorScales
    # The tool, in messages, and where the scales come from, in plans.
    tool: str
    origin: str
    # Names that the tool gives to tensors without an ONNX node; None: none.
    own_names: re.Pattern[str] | None = None
    # Entries that no pair stands for, each with the reason.
    skipped: UnusedLines = ()
    # Name of the format, by which a backend may claim it.
    kind: str = ""
    # How entries are counted: in lines of the file, or one by one.
    unit: str = "line"
    # All that the format can hold is symmetric int8, so that a plan of another type is none of this file.
    only_int8: bool = True

    def is_own_name(self, name: str) -> bool:
        """True for a tensor that the tool added and named itself."""
        return self.own_names is not None and self.own_names.match(name) is not None


def refuse_non_int8(entry: TensorScale) -> str:
    """Why a format of scales of symmetric int8 has no place for an entry; "" where it has."""
    if entry.role.is_constant:
        return "the format has scales of activations only"
    if entry.readers:
        return "the format has one scale for all that reads a tensor"
    spec = entry.spec
    fits = spec.bits == 8 and spec.signed and spec.has_one_scale and not spec.is_float
    return "" if fits and not np.any(entry.zero_point) else "the format has symmetric int8 only"


@dataclass(frozen=True, eq=False)
class ImportFormat:
    """One format of such files.

    recognizes: of a file's bytes, whether it is one. parse: its content, of the bytes and the file's name in messages;
    it raises CalibrationError. write: a file with these scales; None for a format that is only read. refuse: why the
    format has no place for a scale, "" where it has. For people: title, whose files these are; mark, by what one is
    recognized; limits, what it cannot hold.
    """

    name: str
    recognizes: Callable[[bytes], bool]
    parse: Callable[[bytes, str], ScaleTable]
    write: Callable[[Sequence[TensorScale]], bytes] | None = None
    refuse: Callable[[TensorScale], str] = refuse_non_int8
    title: str = ""
    mark: str = ""
    limits: str = ""


class NoGridError(ValueError):
    """An entry that is well formed, and that no pair of integers stands for; its text says why."""


def make_entry(
    name: str,
    line: int,
    numbers: tuple[Any, Any],
    *,
    bits: int,
    signed: bool,
    grain: Granularity = _ONE_SCALE,
    storage: str = "",
    narrow_range: bool = False,
    role: Role = Role.ACTIVATION,
    readers: Names = (),
) -> TensorScale:
    """An entry of the scale and the zero point of a file, with the spec that they say.

    Raises ValueError with the fault of wrong numbers, NoGridError for those of no pair.
    """
    scale, zero = map(as_float64, numbers)
    if not are_scales(scale):
        raise ValueError(f"the scale of {name} is not a positive, finite number")
    one = isinstance(grain, PerTensor)
    scale, zero = unwrap_single(one, scale, zero)
    zero = np.broadcast_to(zero, scale.shape) if zero.size == 1 else zero
    if zero.shape != scale.shape or (one and scale.ndim):
        raise ValueError(
            f"{name} has scales of shape {list(scale.shape)} and zero points of {list(zero.shape)}"
        )
    if (zero % 1).any():
        raise NoGridError("a zero point between two integers")
    # No format says it in a way that all tools agree on; the numbers do.
    symmetric = bool((zero == (0 if signed else 1 << (bits - 1))).all())
    try:
        spec = QuantSpec(
            bits=bits,
            signed=signed,
            symmetric=symmetric,
            narrow_range=narrow_range,
            granularity=grain,
            storage=storage,
        )
    except ConfigError as error:
        raise NoGridError(error.fault) from error
    # Files hold float64; engines and plans have float32, which is what tools computed.
    steps = cast_quietly(scale, np.float32)
    if not are_scales(steps):
        raise NoGridError("a scale that float32 does not hold")
    if not spec.is_float and ((zero < spec.qmin) | (zero > spec.qmax)).any():
        raise ValueError(f"the zero point of {name} is outside {spec.qmin}…{spec.qmax}")
    return TensorScale(name, steps, line, as_int32(zero), spec, role, readers)


def sort_by_name(entries: Sequence[TensorScale]) -> Mapping[str, TensorScales]:
    """The entries of each tensor: that of all its readers first, then those of some."""
    grouped: dict[str, TensorScales] = {}
    # Stable, so that of several for all readers the first in the file counts.
    for entry in sorted(entries, key=lambda entry: bool(entry.readers)):
        grouped[entry.name] = (*grouped.get(entry.name, ()), entry)
    return grouped


# Faults listed in an error.
_SHOWN = 5
# Whatever an entry of another shape makes of the code that reads it is a fault of the file.
MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
_MEND = "mend these entries, or delete them: what then has no scale is listed"


@dataclass(eq=False)
class JsonTable:
    """The content of a JSON file while it is read. root: its values; tool, name: of the format."""

    text: JsonText
    root: Any
    tool: str
    name: str
    entries: list[TensorScale] = field(default_factory=list)
    skipped: list[UnusedLine] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    count: int = 0

    def add_entry(
        self, path: tuple[Any, ...], name: str, make: Callable[[int], TensorScale]
    ) -> None:
        """Add what `make` gives for the number of the entry. path: of the entry in the file."""
        self.count += 1
        try:
            self.entries.append(make(self.count))
        except NoGridError as error:
            self.skipped.append(UnusedLine(name=name, line=self.count, reason=str(error)))
        except MALFORMED as error:
            # The line is looked for in the whole text, so for the faults that are shown alone.
            if len(self.faults) < _SHOWN:
                cause = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                # Python's own words name a type of Python, and no entry.
                if isinstance(error, (AttributeError, TypeError)):
                    cause = "is built otherwise"
                self.faults.append(f"line {find_line(self.text.text, path)}: {name}: {cause}")

    def make_table(self, header: str) -> ScaleTable:
        """The table. Raises CalibrationError that lists the faults, and for a file without entries."""
        if self.faults:
            raise CalibrationError(self.text.source, "; ".join(self.faults), _MEND, code="Q505")
        if not self.count:
            raise CalibrationError(
                self.text.source, "holds no entry", f"write it with {self.tool} again", code="Q505"
            )
        return ScaleTable(
            source=self.text.source,
            header=header,
            entries=tuple(self.entries),
            skipped=tuple(self.skipped),
            tool=self.tool,
            origin=f"{self.tool} {self.name}",
            unit="entry",
            only_int8=False,
        )


def open_table(data: bytes, source: str, tool: str, name: str) -> JsonTable:
    """The table of a JSON file, empty. Raises CalibrationError for bytes that are no JSON object."""
    fix = f"write it with {tool} again"
    try:
        # Some editors put a byte order mark in front.
        text = JsonText(source, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CalibrationError(source, "is binary; this is JSON", fix, code="Q505") from error
    root = text.parse(CalibrationError, fix, code="Q505")
    if not isinstance(root, Mapping):
        raise CalibrationError(source, "is no JSON object", fix, code="Q505")
    return JsonTable(text, root, tool, name)


def name_entry(row: Any, k: int) -> str:
    """The name of a row of a list of entries; one without a name is called by its number."""
    usual = f"entry {k + 1}"
    return str(row.get("name", usual)) if isinstance(row, Mapping) else usual


def write_table(root: JsonObject) -> bytes:
    """A JSON file with these values."""
    return (json.dumps(root, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def list_numbers(entry: TensorScale) -> tuple[Sequence[Any] | Any, Sequence[Any] | Any]:
    """Scale and zero point as JSON values: numbers, or nested lists. A float32 comes back from them to the bit."""
    qparams = entry.make_qparams("")
    return qparams.scale.tolist(), qparams.zero_point.tolist()
