"""The cost of 16-bit sums that saturate on samples, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.sites import Refusal


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """One node on the samples: how many of the sums it computed saturated."""

    node: str
    saturated: int
    sums: int

    @property
    def share(self) -> float:
        """Of all sums of the node, 0 to 1."""
        return self.saturated / self.sums if self.sums else 0.0


@dataclass(frozen=True, kw_only=True)
class OutputCost:
    """One output: the saturating model against the exact one."""

    output: str
    # inf where no sum of a sample saturated.
    sqnr_db: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The errors that CPUs without VNNI make on samples."""

    data: str = ""
    samples: int = 0
    synthetic: bool = False
    # Those whose weights can overflow.
    nodes: tuple[NodeCost, ...] = ()
    outputs: tuple[OutputCost, ...] = ()
    # Those of the nodes that could not be emulated.
    skipped: tuple[Refusal, ...] = ()

    @property
    def saturated(self) -> int:
        """Sums that saturated, of all nodes."""
        return sum(one.saturated for one in self.nodes)
