"""Inputs of a decoder with caches, whose sizes belong together: the tokens, those before them, and the mask of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from onnxq.graph import ValueInfo

_INTS = frozenset({TensorProto.INT32, TensorProto.INT64})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True)
class DecoderInputs:
    """Axes are named as `name_axis` names them.

    past: those of the tokens in the caches. new: that of the tokens, or how many there are. whole: axes of both
    together. positions: inputs that count the tokens. switches: booleans that say whether caches are read; an If
    decoder has one branch for each.
    """

    past: frozenset[str]
    new: str | int
    whole: frozenset[str]
    positions: frozenset[str]
    switches: frozenset[str]


def name_axis(value: ValueInfo, axis: int) -> str:
    """The symbol of an axis of no fixed size, or "input:axis" where it has none."""
    dim = (value.shape or ())[axis]
    return dim if isinstance(dim, str) else f"{value.name}:{axis}"


def find_decoder(inputs: Sequence[ValueInfo]) -> DecoderInputs | None:
    """The inputs of a decoder with caches of any length; None for other models."""
    past = frozenset(found for value in inputs if (found := _find_past(value)) is not None)
    ids = next((v for v in inputs if _has_tokens(v) and not _is_called(v, "mask", "position", "past")), None)
    if not past or ids is None:
        return None
    length = (ids.shape or ())[1]
    new = length if isinstance(length, int) else name_axis(ids, 1)
    masks = [v for v in inputs if _has_tokens(v) and _is_called(v, "mask") and not isinstance((v.shape or ())[1], int)]
    # Exporters write "total_sequence_length", "past_sequence_length + 1", "past + sequence", or a symbol of its own.
    whole = {key for value in masks if (key := name_axis(value, 1)) != new and "encoder" not in key.lower()}
    positions = {value.name for value in inputs if _has_tokens(value) and _is_called(value, "position")}
    switches = {value.name for value in inputs if value.dtype == TensorProto.BOOL and _is_called(value, "cache")}
    return DecoderInputs(past, new, frozenset(whole), frozenset(positions), frozenset(switches))


def _is_called(value: ValueInfo, *parts: str) -> bool:
    return any(part in value.name.lower() for part in parts)


def _has_tokens(value: ValueInfo) -> bool:
    """True for integers [batch, tokens]."""
    return value.dtype in _INTS and len(value.shape or ()) == 2


def _find_past(value: ValueInfo) -> str | None:
    """The axis of the tokens in a cache: of [batch, heads, tokens, size], or with both parts in front."""
    shape = value.shape or ()
    if not (value.dtype in _FLOATS and len(shape) in (4, 5) and _is_called(value, "past", "cache")):
        return None
    key = name_axis(value, len(shape) - 2)
    # What an encoder said is read as well, and never grows.
    return None if isinstance(shape[-2], int) or "encoder" in f"{value.name} {key}".lower() else key
