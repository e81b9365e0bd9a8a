"""The float types that a model computes in where no pair is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from onnxq.config.schema import Finite, Natural
from onnxq.plan.forms import EDGE
from onnxq.sites import Edge
from onnxq.spec import FloatType


class KeepReason(str, Enum):
    """Why a node computes in float32 beside others that do not."""

    OVERFLOW = "overflow"  # values that it reads or makes, or a constant, come near the largest number of the type
    SUM = "sum"  # what it adds up may
    SMALL = "small"  # values that it makes lie below the normal numbers of the type
    PRECISION = "precision"  # from rounded inputs it makes something else
    SCALE = "scale"  # a scale of what it reads is no normal number of the type
    EXISTING = "existing"  # it reads a pair that the model came with, whose scale the type does not hold exactly
    KERNEL = "kernel"  # the engine has no kernel
    ONNX = "onnx"  # ONNX does not know the operator in the type, or nobody knows what type it reads
    SHAPES = "shapes"  # it computes shapes or positions
    RULE = "rule"  # the configuration says so
    UNSEEN = "unseen"  # no sample ran it
    CASTS = "casts"  # it stands between such nodes, and Casts around it would cost more than it saves
    TRIAL = "trial"  # without it the answers of the whole network were worse

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class KeptFloat32:
    """A node that computes in float32. figure: the value that says why, a magnitude, or dB where precision is lost.

    detail: the engine's or the rule's own words.
    """

    node: str
    reason: KeepReason
    figure: Finite = 0.0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The float type of all nodes but some, and that of inputs and outputs.

    nodes: how many compute in `type`. limited: inputs that read a mask, limited to what the type holds. io: the type of
    float inputs and outputs; None: as the model came.
    """

    type: FloatType
    nodes: Natural = 0
    kept: tuple[KeptFloat32, ...] = ()
    limited: tuple[Annotated[Edge, EDGE], ...] = ()
    io: FloatType | None = None
