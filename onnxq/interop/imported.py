"""What an import gives back: the plan, and where every scale of the cache and every site of the plan ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onnxq.plan import Plan
from onnxq.sites import Caution


class Why(str, Enum):
    """Why a name of the cache is no tensor of the prepared model."""

    FOLDED = "folded"  # the model has it; preparation fused it into another
    TENSORRT = "tensorrt"  # a layer TensorRT made up and named itself
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A site and the line its scale came from. name: in the cache. through: "" or why another tensor's scale holds."""

    site: str
    name: str
    line: int
    scale: float
    through: str = ""


@dataclass(frozen=True, kw_only=True)
class Left:
    """A line no site took: its reason, and for unknown names the nearest of the model."""

    name: str
    line: int
    why: Why | None = None
    reason: str = ""
    nearest: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A site the cache has no scale for. done: what became of it ("" when it is still without numbers)."""

    site: str
    tensor: str
    nearest: tuple[str, ...] = ()
    done: str = ""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A plan with the cache's scales.

    matched: by site. unmatched: names that are no tensor of the prepared model (`why`: folded, tensorrt, unknown).
    unused: tensors the plan does not quantize. missing: sites without a scale in the cache. notes: what else to know.
    """

    plan: Plan
    cache: str
    header: str
    entries: int
    matched: tuple[Matched, ...] = ()
    unmatched: tuple[Left, ...] = ()
    unused: tuple[Left, ...] = ()
    missing: tuple[Absent, ...] = ()
    notes: tuple[Caution, ...] = ()
