"""Exceptions for people: every one names a subject, a cause and a fix.

    OnnxqError                      code, subject, cause, fix, file, line
    ├── ModelError                  the model file: missing, corrupt, unsupported
    ├── DataError                   calibration data: names, ranks, dtypes, NaN, empty
    ├── ConfigError                 YAML or options: unknown key, bad value
    ├── PlanError                   a plan that does not fit its model or target
        ├── CalibrationError            statistics that give no scale
        ├── OutputError                 a result that cannot be written to its path
        ├── VerificationError           a result that does not do what its plan says
    ├── WorkerError                 processes or a cluster that work is spread over
    └── MissingDependencyError      an extra that is not installed

The CLI prints these without a traceback and exits with 1. Any other exception that escapes is a defect of onnxq and
shows its traceback.

Every error has a code of `onnxq.codes` ("Q303"), by default that of its class. Codes are stable, texts are not.
Messages name parameters in backticks (`force=True`); the command line translates these into its options. The fix for an
unknown name suggests the nearest ones.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

# The cause and the fix of an error.
CauseAndFix = tuple[str, str]
# Characters of a list of names: the longest of onnxq's own, the options of `search`, has 731.
_MOST = 800

# Text of files in messages: a model's names may hold any character, those that steer a terminal or a CI system, too.
# They are escaped where text is made, `\x1b`, `\n`; values keep them.
#
# Bytes of a file name that are not UTF-8, as Python decodes them (PEP 383): no output can hold them.
_SURROGATES = re.compile("[\ud800-\udfff]")
# Controls of both sets, and what changes the direction of text or ends a line ("Trojan Source", CVE-2021-42574).
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Commands that GitHub, Azure and TeamCity take from a log: `::add-mask::x` at the start of a line, `##vso[…]` anywhere.
_COMMANDS = re.compile(r"^(?P<start>\s*):(?=:)|#(?=#\w*\[)", re.MULTILINE)


def replace_surrogates(text: str) -> str:
    """Replace every byte of a file name that is not UTF-8 by the replacement character U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def escape_line(text: str) -> str:
    """Escape a name, or a line that holds names: the result is one line without controls."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], replace_surrogates(text))


def escape_lines(text: str) -> str:
    """Escape a text of several lines of our own before it is printed: in none of them there is a control or command."""
    lines = "\n".join(map(escape_line, text.split("\n")))
    return _COMMANDS.sub(lambda match: f"{match['start'] or ''}\\x{ord(match[0][-1]):02x}", lines)


def escape_json(document: str) -> str:
    """Escape the strings of a JSON document, by JSON's own escapes; it stays the same document."""
    controls = _CONTROLS.sub(
        # Line feeds stand between entries: JSON escapes those of texts.
        lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}",
        replace_surrogates(document),
    )
    return _COMMANDS.sub(lambda match: f"\\u{ord(match[0][-1]):04x}", controls)


def dump_json(value: Any) -> str:
    """Convert plain values to a JSON document that may be printed."""
    return escape_json(json.dumps(value, indent=1, allow_nan=False))


Same = TypeVar("Same", bound="OnnxqError")


@dataclass(frozen=True)
class Location:
    """A position in a text file: `file:line: within`.

    file: "" for text without a file. line: counted from 1. within: e.g. a dotted path.
    """

    file: str
    line: int | None = None
    within: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(filter(None, (place, self.within)))

    def __truediv__(self, within: str) -> Location:
        """The position of a part: `location / "rules[0]"`."""
        return replace(self, within=f"{self.within}: {within}" if self.within else within)


class OnnxqError(Exception):
    """A fault with a subject (node, tensor, file:line), a cause and a fix.

    subject: a name, or a value whose text is one; or a path or Location, which also sets `file` and `line`.
    code: an entry of the catalogue; "" for the code of the class.
    file, line: position of the fault; "" and None for a fault that is in no file.
    details: lines below the others, e.g. further faults.
    node: the name of the node that is at fault, where an engine tells it.

    Its text is escaped: each part is one line, whatever the names in it hold. The attributes are as given.
    """

    kind: ClassVar[str] = "error"
    default_code: ClassVar[str] = "Q000"
    node: str = ""

    def __init__(
        self,
        subject: object,
        cause: str,
        fix: str = "",
        *,
        code: str = "",
        file: str = "",
        line: int | None = None,
        details: Sequence[str] = (),
    ) -> None:
        if isinstance(subject, Location):
            file = file or subject.file
            line = line or subject.line
        elif isinstance(subject, os.PathLike):
            file = file or os.fspath(subject)
        self.subject = str(subject)
        self.cause = cause
        self.fix = fix
        # A fault without an entry of its own counts as one of its class.
        self.code = code or self.default_code
        self.file = file
        self.line = line
        self.details = tuple(details)
        super().__init__(str(self))

    @property
    def fault(self) -> str:
        """Its subject and its cause."""
        # A model that was not read from a file has no name.
        return ": ".join(filter(None, (self.subject, self.cause)))

    def replace_text(
        self: Same, subject: str | None = None, cause: str | None = None, fix: str | None = None
    ) -> Same:
        """A copy with other texts and the same class, code, file and line. None keeps a text."""
        texts = {"subject": subject, "cause": cause, "fix": fix}
        replaced = {name: text for name, text in texts.items() if text is not None}
        return type(self)(**{**self._list_parts(), **replaced})

    def name_file(self: Same, file: str | os.PathLike[str]) -> Same:
        """A copy whose `file` is this one."""
        return type(self)(**{**self._list_parts(), "file": os.fspath(file)})

    def __str__(self) -> str:
        return self.join_lines(f"{self.fault} [{self.code}]")

    def join_lines(self, first: str) -> str:
        """Format the error for people: a first line, and indented the fix and the details, each of them escaped."""
        fix = (f"fix: {self.fix}",) if self.fix else ()
        return "\n  ".join(map(escape_line, (first, *fix, *self.details)))

    def __reduce__(self) -> tuple[Callable[..., OnnxqError], tuple[()]]:
        # By default exceptions pickle as class(*args), and here `args` holds the whole message only.
        return partial(type(self), **self._list_parts()), ()

    def _list_parts(self) -> dict[str, Any]:
        """Its values, by the parameters of its class."""
        parts = ("subject", "cause", "fix", "code", "file", "line", "details")
        return {name: getattr(self, name) for name in parts}


# The class of an error that a caller wants.
ErrorClass = type[OnnxqError]


class ModelError(OnnxqError):
    """The model file is missing, corrupt or of an unsupported kind."""

    kind = "model"
    default_code = "Q100"


class DataError(OnnxqError):
    """Calibration data does not fit the model's inputs."""

    kind = "data"
    default_code = "Q200"


class ConfigError(OnnxqError):
    """A configuration key or value is wrong; the subject carries file, line and dotted path."""

    kind = "config"
    default_code = "Q300"


class PlanError(OnnxqError):
    """A plan does not fit its model, or its target does not support it."""

    kind = "plan"
    default_code = "Q400"


class CalibrationError(OnnxqError):
    """Statistics that give no scale: NaN, inf, no value observed."""

    kind = "calibration"
    default_code = "Q500"


class OutputError(OnnxqError):
    """A result cannot be written to its path."""

    kind = "output"
    default_code = "Q600"


class VerificationError(OnnxqError):
    """The written model is not legal or does not follow its plan."""

    kind = "verification"
    default_code = "Q700"


class WorkerError(OnnxqError):
    """Processes or machines that work is spread over do not do it."""

    kind = "workers"
    default_code = "Q900"


class MissingDependencyError(OnnxqError):
    """An optional package is needed; the fix is its install line."""

    kind = "dependency"
    default_code = "Q800"


def find_nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to `limit` candidates similar to `name`, best first; () without any. Letter case does not count."""
    known = sorted({str(candidate) for candidate in candidates})
    # Backwards, so that of names that differ in letter case alone the first one stays.
    folded = {candidate.casefold(): candidate for candidate in reversed(known)}
    # 0.6 is difflib's own default: one wrong letter in three still matches.
    close = get_close_matches(name.casefold(), folded, n=limit, cutoff=0.6)
    return tuple(folded[key] for key in close)


def suggest_names(name: str, candidates: Iterable[str]) -> str:
    """A fix for an unknown name: the nearest candidates, else as many of all as fit into a few lines."""
    known = sorted({str(candidate) for candidate in candidates})
    close = find_nearest(name, known)
    if close:
        return _ask(close)
    if not known:
        return "there are none"
    listed = ", ".join(known)
    if len(listed) <= _MOST:
        return f"known: {listed}"
    return f"known: {listed[:_MOST].rpartition(', ')[0] or known[0]}, … ({len(known)} in all)"


def suggest_files(path: Path) -> str:
    """A fix for a file that is not there: the nearest names in its folder; "" for none."""
    beside = os.listdir(path.parent) if os.path.isdir(path.parent) else ()
    close = find_nearest(path.name, beside)
    return _ask([str(path.parent / name) for name in close]) if close else ""


def _ask(names: Iterable[str]) -> str:
    return f"did you mean {' or '.join(map(repr, names))}?"
