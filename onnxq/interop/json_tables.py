"""Tables of scales in JSON: every entry is read, left out with its reason, or a fault of the file."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxq.config.schema import JsonText, find_line
from onnxq.errors import CalibrationError
from onnxq.interop.base import NoGridError, ScaleTable, TensorScale, UnusedLine
from onnxq.sites import JsonObject

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
