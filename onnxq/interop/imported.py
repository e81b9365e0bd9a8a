"""The result of an import: the plan, and the outcome for every line of the cache and every site of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onnxq.plan import Plan
from onnxq.sites import Caution
from onnxq.wording import abbreviate


class UnmatchedKind(str, Enum):
    """Why a name of the cache is no tensor of the prepared model."""

    FOLDED = "folded"  # the model has it; preparation fused it into another
    TENSORRT = "tensorrt"  # a layer that TensorRT added and named itself
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class MatchedSite:
    """A site and the line that its scale came from."""

    site: str
    # The tensor of the line, and its number in the file.
    name: str
    line: int
    scale: float
    # Why the scale of another tensor holds for the site; "" for the tensor's own.
    through: str = ""


@dataclass(frozen=True, kw_only=True)
class UnusedLine:
    """A line that no site took."""

    name: str
    line: int
    # None for a tensor of the prepared model, which the plan does not quantize.
    why: UnmatchedKind | None = None
    reason: str = ""
    # For unknown names, the nearest of the model.
    nearest: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MissingSite:
    """A site that the cache has no scale for."""

    site: str
    tensor: str
    nearest: tuple[str, ...] = ()
    # How the site got a scale otherwise; "" while it has none.
    done: str = ""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A plan with the scales of a cache."""

    __repr__ = abbreviate

    plan: Plan
    cache: str
    header: str
    # Number of lines with a scale.
    entries: int
    # In the order of the plan's sites.
    matched: tuple[MatchedSite, ...] = ()
    # Names that are no tensor of the prepared model.
    unmatched: tuple[UnusedLine, ...] = ()
    # Tensors of it that the plan does not quantize.
    unused: tuple[UnusedLine, ...] = ()
    missing: tuple[MissingSite, ...] = ()
    notes: tuple[Caution, ...] = ()
