"""Exceptions a person can act on.

    OnnxqError                      code, subject, cause, fix, file, line
    ├── ModelError                  the model file: missing, corrupt, unsupported
    ├── DataError                   calibration data: names, ranks, dtypes, NaN, empty
    ├── ConfigError                 YAML or options: unknown key, bad value
    ├── PlanError                   a plan that does not fit its model or target
    ├── CalibrationError            statistics that cannot give a scale
    ├── OutputError                 what cannot be written where it was asked for
    ├── VerificationError           the result is not what the plan promised
    └── MissingDependencyError      an extra that is not installed

Everything the user can mend is one of these; the CLI prints them without a traceback and exits 1.
Anything else that escapes is a defect of onnxq and shows its traceback.

Every error has a code of `onnxq.codes` ("Q303"), its class's own where none is given; it stays the same when the words
change. Messages speak of parameters in backticks (`force=True`), which the command line shows as its options.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

Same = TypeVar("Same", bound="OnnxqError")


@dataclass(frozen=True)
class Location:
    """A place in a text file: `file:line: within`.

    file: "" where the text is in no file. line: counted from 1. within: e.g. a dotted path.
    """

    file: str
    line: int | None = None
    within: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.within) if part)

    def __truediv__(self, within: str) -> Location:
        """A place further inside."""
        return replace(self, within=f"{self.within}: {within}" if self.within else within)


class OnnxqError(Exception):
    """A fault with a subject (node, tensor, file:line), a cause and a fix.

    subject: a name; or a path or Location, which then gives `file` and `line` as well.
    code: an entry of the catalogue; "" for the one that any error of this class has.
    file, line: where the fault is written, "" and None where it is in no file.
    """

    kind: ClassVar[str] = "error"
    default_code: ClassVar[str] = "Q000"

    def __init__(
        self,
        subject: str | os.PathLike[str] | Location,
        cause: str,
        fix: str = "",
        *,
        code: str = "",
        file: str = "",
        line: int | None = None,
    ) -> None:
        if isinstance(subject, Location):
            file, line = file or subject.file, line or subject.line
        elif isinstance(subject, os.PathLike):
            file = file or os.fspath(subject)
        self.subject = str(subject)
        self.cause = cause
        self.fix = fix
        self.code = code or self.default_code
        self.file = file
        self.line = line
        super().__init__(str(self))

    def replace_text(self: Same, subject: str | None = None, cause: str | None = None, fix: str | None = None) -> Same:
        """The same fault in other words: class, code, file and line stay. None keeps the words."""
        texts = (
            self.subject if subject is None else subject,
            self.cause if cause is None else cause,
            self.fix if fix is None else fix,
        )
        return type(self)(*texts, code=self.code, file=self.file, line=self.line)

    def name_file(self: Same, file: str | os.PathLike[str]) -> Same:
        """The same fault, found in this file."""
        texts = (self.subject, self.cause, self.fix)
        return type(self)(*texts, code=self.code, file=os.fspath(file), line=self.line)

    def __str__(self) -> str:
        text = f"{self.subject}: {self.cause} [{self.code}]"
        return f"{text}\n  fix: {self.fix}" if self.fix else text

    def __reduce__(self) -> tuple[Callable[..., OnnxqError], tuple[Any, ...]]:
        return _restore, (type(self), self.subject, self.cause, self.fix, self.code, self.file, self.line)


def _restore(
    kind: type[OnnxqError], subject: str, cause: str, fix: str, code: str, file: str, line: int | None
) -> OnnxqError:
    return kind(subject, cause, fix, code=code, file=file, line=line)


class ModelError(OnnxqError):
    """The model file is missing, corrupt or outside what onnxq reads."""

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
    """A plan does not fit its model, or asks the target for what it cannot do."""

    kind = "plan"
    default_code = "Q400"


class CalibrationError(OnnxqError):
    """Statistics that cannot give a scale: NaN, inf, nothing observed."""

    kind = "calibration"
    default_code = "Q500"


class OutputError(OnnxqError):
    """A result cannot be written where it was asked for."""

    kind = "output"
    default_code = "Q600"


class VerificationError(OnnxqError):
    """The model made is not legal or does not do what the plan promised."""

    kind = "verification"
    default_code = "Q700"


class MissingDependencyError(OnnxqError):
    """An optional package is needed; the fix is its install line."""

    kind = "dependency"
    default_code = "Q800"
