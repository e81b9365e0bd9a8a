"""Identity: where a tensor is quantized, said in names and never in positions."""

from __future__ import annotations

from collections.abc import Container, Iterable
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


def is_within(scope: str, outer: str) -> bool:
    """True when `scope` is `outer` or lies inside it; every scope lies in the main graph, ""."""
    return not outer or scope == outer or scope.startswith(f"{outer}/")


def split_scope(text: str, scopes: Container[str]) -> tuple[str, str]:
    """Scope and name of a site's text, `str(site)`; scope "" for one of the main graph.

    scopes: the scopes of the model. Names and scopes hold "::" themselves ("onnx::MatMul_12"), so that only a prefix
    that is a scope of the model is one; the longest holds.
    """
    for end in range(len(text) - 3, 0, -1):
        if text[end : end + 2] == "::" and text[:end] in scopes:
            return text[:end], text[end + 2 :]
    return "", text


@dataclass(frozen=True)
class Refusal:
    """What was asked for and denied, why, and what the person can do.

    subject: a node, tensor or site name. rule: the placement rule or check that refused. code: its kind, of
    `onnxq.codes`.
    """

    subject: str
    reason: str
    fix: str = ""
    rule: str = ""
    code: str = "R100"


@dataclass(frozen=True)
class LeftFloat:
    """What stays float because int8 does not pay there, or because a rule of the person says so.

    subject: a node name. rule: the rule that leaves it. code: its kind, of `onnxq.codes`.
    """

    subject: str
    reason: str
    rule: str = ""
    code: str = "F102"


Unquantized = Refusal | LeftFloat


def split_unquantized(found: Iterable[Unquantized]) -> tuple[tuple[Refusal, ...], tuple[LeftFloat, ...]]:
    """What was asked for and denied, and what stays float by a rule; each subject once, as it was first named."""
    first: dict[str, Unquantized] = {}
    for one in found:
        first.setdefault(one.subject, one)
    refusals = tuple(one for one in first.values() if isinstance(one, Refusal))
    return refusals, tuple(one for one in first.values() if isinstance(one, LeftFloat))


class Caution(str):
    """A warning: its text, with its kind as `code`, of `onnxq.codes`."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: str, text: str) -> Caution:
        made = super().__new__(cls, text)
        made.code = code
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.code, str(self)
