"""Calibration methods and data readers, by the names that onnxruntime.quantization gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from typing import Any


class CalibrationMethod(Enum):
    """How ranges of activations are found."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class CalibrationDataReader(ABC):
    """Base of a reader of samples: `get_next` gives {input name: array}, and None after the last one."""

    @abstractmethod
    def get_next(self) -> Any:
        """The next sample, or None."""

    def __iter__(self) -> Iterator[Any]:
        return drain_reader(self)

    def __len__(self) -> int:
        raise NotImplementedError

    def set_range(self, start_index: int, end_index: int) -> None:
        """Let `get_next` give these samples only, where a reader loads them in parts."""
        raise NotImplementedError


def read_samples(reader: Any, stride: int | None = None) -> Any:
    """The samples of a reader one after the other, none of which is kept; other data as it is.

    A reader that was read to its end before, and can `rewind`, begins again. stride: samples that `set_range` asks for
    at a time.
    """
    return _read(reader, stride) if hasattr(reader, "get_next") else reader


def _read(reader: Any, stride: int | None) -> Iterator[Any]:
    count = 0
    for start in range(0, len(reader), stride) if stride else (None,):
        if stride and start is not None:
            reader.set_range(start_index=start, end_index=start + stride)
        for sample in drain_reader(reader):
            count += 1
            yield sample
    if not count and hasattr(reader, "rewind"):
        reader.rewind()
        yield from drain_reader(reader)


def drain_reader(reader: Any) -> Iterator[Any]:
    """Yield what `get_next` gives, up to None. An array is no None, but cannot be compared with it either."""
    while (sample := reader.get_next()) is not None:
        yield sample
