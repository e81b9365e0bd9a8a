"""Predicted times of nodes, as the planner asks a backend for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from onnxq.arrays import Shape


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One node as its cost depends on it; a shape that is not known is None."""

    op_type: str
    inputs: tuple[Shape | None, ...]
    output: Shape | None
    weight: Shape | None = None
    group: int = 1
    kernel: Shape = ()
    strides: Shape = ()
    # Operator of the activation behind, which the kernel computes as well; "" without one.
    activation: str = ""


@dataclass(frozen=True)
class Cost:
    """Microseconds of one node inside a float region and inside an int8 region."""

    float_us: float
    int8_us: float


class MachineCosts(Protocol):
    """The costs of one kind of machine."""

    def predict_node(self, case: OpCase) -> Cost:
        """Time of one node, float and int8; sizes that are not known are taken small."""

    def predict_quantize(self, elements: int | None, *, from_conv: bool = False, dynamic: bool = False) -> float:
        """Microseconds from a float producer to int8 consumers.

        elements: None where they are not known. from_conv: the producer is a Conv. dynamic: on a scale of each run.
        """

    def predict_dequantize(self, elements: int | None, *, to_conv: bool = False) -> float:
        """Microseconds from an int8 producer to float consumers. to_conv: a consumer is a Conv."""
