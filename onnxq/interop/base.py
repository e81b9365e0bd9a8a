"""Formats of files with scales by tensor, as other tools write them, and the content of such a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TensorScale:
    """A tensor of the network that was calibrated, its scale of symmetric int8, and its line in the file."""

    name: str
    scale: np.float32
    line: int


@dataclass(frozen=True, kw_only=True)
class ScaleTable:
    """The content of a file. header: what the tool says of itself there, such as "TRT-8601-EntropyCalibration2"."""

    source: str
    header: str
    entries: tuple[TensorScale, ...]
    # The tool, in messages, and where the scales come from, in plans.
    tool: str
    origin: str
    # Names that the tool gives to tensors without an ONNX node; None: none.
    own_names: re.Pattern[str] | None = None

    def is_own_name(self, name: str) -> bool:
        """True for a tensor that the tool added and named itself."""
        return self.own_names is not None and self.own_names.match(name) is not None


@dataclass(frozen=True, eq=False)
class ImportFormat:
    """One format of such files.

    recognizes: of a file's bytes, whether it is one. parse: its content, of the bytes and the file's name in messages;
    it raises CalibrationError. write: a file with these scales by tensor; None for a format that is only read.
    """

    name: str
    recognizes: Callable[[bytes], bool]
    parse: Callable[[bytes, str], ScaleTable]
    write: Callable[[Mapping[str, np.float32]], bytes] | None = None
