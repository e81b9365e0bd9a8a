"""What every preparation pass takes and gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxq.graph import ModelLike
from onnxq.sites import Refusal


@dataclass(frozen=True)
class Context:
    """What a pass may look at besides the model: the target's name and the passes the user switched off."""

    target: str = "ort"
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PassReport:
    """What one pass did.

    changed: one "node: what happened" line a change. skipped: what it would have changed, and why it did not.
    """

    name: str
    changed: tuple[str, ...] = ()
    skipped: tuple[Refusal, ...] = ()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A float-equivalent model ready for calibration, and the report of each pass that ran, in order."""

    proto: ModelLike
    reports: tuple[PassReport, ...]


@dataclass(frozen=True)
class PassEntry:
    """A pass under the name by which a configuration switches it off. target: the only one it serves; "": all."""

    name: str
    run: Callable[[ModelLike, Context], tuple[ModelLike, PassReport]]
    target: str = ""
