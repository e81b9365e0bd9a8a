"""Types and formats, by the names that onnxruntime.quantization gives them."""

from __future__ import annotations

from enum import Enum
from typing import Any


class _Word(Enum):
    """A choice that scripts may also read from their command line, by its name."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls, text: str) -> Any:
        """The member of this name. Raises ValueError for any other, as argparse wants it."""
        try:
            return cls[text]
        except KeyError:
            raise ValueError(f"{text!r} is none of {', '.join(cls.__members__)}") from None


class QuantType(_Word):
    """Type of quantized values."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6


class QuantFormat(_Word):
    """Form of the quantized model; onnxq writes QDQ."""

    QOperator = 0
    QDQ = 1
