"""Exceptions a person can act on.

    OnnxqError                      subject, cause, fix
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
"""

from __future__ import annotations


class OnnxqError(Exception):
    """A fault with a subject (node, tensor, file:line), a cause and a fix."""

    def __init__(self, subject: str, cause: str, fix: str = "") -> None:
        self.subject = subject
        self.cause = cause
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.subject}: {self.cause}"
        return f"{text}\n  fix: {self.fix}" if self.fix else text

    def __reduce__(self) -> tuple[type[OnnxqError], tuple[str, str, str]]:
        return type(self), (self.subject, self.cause, self.fix)


class ModelError(OnnxqError):
    """The model file is missing, corrupt or outside what onnxq reads."""


class DataError(OnnxqError):
    """Calibration data does not fit the model's inputs."""


class ConfigError(OnnxqError):
    """A configuration key or value is wrong; the subject carries file, line and dotted path."""


class PlanError(OnnxqError):
    """A plan does not fit its model, or asks the target for what it cannot do."""


class CalibrationError(OnnxqError):
    """Statistics that cannot give a scale: NaN, inf, nothing observed."""


class OutputError(OnnxqError):
    """A result cannot be written where it was asked for."""


class VerificationError(OnnxqError):
    """The model made is not legal or does not do what the plan promised."""


class MissingDependencyError(OnnxqError):
    """An optional package is needed; the fix is its install line."""
