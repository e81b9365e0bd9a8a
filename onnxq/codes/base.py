"""Entries and areas of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """A kind of fault, refusal or warning."""

    # Never reused for another kind.
    id: str
    title: str
    # One or two sentences each, for `onnxq explain` and docs/errors.md.
    meaning: str
    fix: str


@dataclass(frozen=True)
class Area:
    """The codes of one part of onnxq. heading: their common beginning, "Q3xx" or "R"."""

    heading: str
    title: str
    codes: tuple[Code, ...]
