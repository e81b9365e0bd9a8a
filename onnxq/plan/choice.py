"""Which alternatives a plan was chosen from, and the figures that decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from onnxq.config.rows import Written
from onnxq.config.schema import Finite, Natural


class PlacementMethod(str, Enum):
    """How the nodes to quantize were chosen."""

    RULES = "rules"  # by the target's rules and predicted times
    MEASURED = "measured"  # by times measured on the machine that planned

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class PlacementChoice:
    """How the placement of pairs was chosen.

    cpu: kind of CPU whose times decided, "any" for all kinds with a cost table; "" where none did.
    candidate: name of the placement that won the measurement; "" where none beat the float model, or none was timed.
    threads: threads of the measurement, 0 without one.
    speedups: time of the float model over that of each candidate.
    """

    method: Written[PlacementMethod] = PlacementMethod.RULES
    cpu: str = ""
    candidate: str = ""
    threads: Natural = 0
    speedups: Mapping[str, Finite] = field(default_factory=dict)


class AttentionKind(str, Enum):
    """The type that attention's products compute in."""

    FLOAT = "float"
    QUANTIZED = "quantized"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """Attention in float or quantized, with the figures of both.

    float_db, quantized_db: lowest SQNR of the outputs with attention in float and quantized, in dB; infinite where
        every output is exact. samples: number of held-back samples they were measured on.
    """

    kind: AttentionKind
    # JSON has no infinity, so that it is the default, which is left out.
    float_db: Finite = math.inf
    quantized_db: Finite = math.inf
    samples: Natural
