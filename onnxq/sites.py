"""Identity: where a tensor is quantized, said in names and never in positions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """What the quantized tensor is to the node that reads it."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, order=True)
class TensorId:
    """A tensor, shared by its consumers. scope "" is the main graph, else e.g. "If_0.else_branch/If_3.then_branch"."""

    name: str
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.scope}::{self.name}" if self.scope else self.name


@dataclass(frozen=True, order=True)
class Edge:
    """One consumer's input: node name (unique over the whole model) and input index."""

    node: str
    index: int
    scope: str = ""

    def __str__(self) -> str:
        text = f"{self.node}/in{self.index}"
        return f"{self.scope}::{text}" if self.scope else text


Site = TensorId | Edge


@dataclass(frozen=True)
class Refusal:
    """What was not quantized though it could have been asked for, why, and what the person can do.

    subject: a node, tensor or site name. rule: the placement rule or check that refused.
    """

    subject: str
    reason: str
    fix: str = ""
    rule: str = ""
