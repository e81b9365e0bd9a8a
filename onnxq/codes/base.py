"""An entry of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """A kind of fault, refusal or warning. id: never given to another kind. meaning, fix: one or two sentences each."""

    id: str
    title: str
    meaning: str
    fix: str
