"""Identity of quantized tensors, by names and never by positions, which change when a graph is edited."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, TypeVar

from onnxq.wording import Word

T = TypeVar("T")


class Role(Word):
    """The use a node makes of a quantized tensor."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"

    @property
    def is_weight(self) -> bool:
        """True for weights."""
        return self is Role.WEIGHT

    @property
    def is_bias(self) -> bool:
        """True for biases."""
        return self is Role.BIAS

    @property
    def is_constant(self) -> bool:
        """True for weights and biases, which are numbers before the network runs."""
        return self.is_weight or self.is_bias

    @property
    def is_measured(self) -> bool:
        """True for activations and outputs, whose scales come from samples."""
        return not self.is_constant


@dataclass(frozen=True, order=True)
class TensorId:
    """A tensor, shared by its consumers. scope: "" is the main graph, else e.g. "If_0.else_branch/If_3.then_branch"."""

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


# None for a tensor that is not there.
MaybeTensor = TensorId | None
Site = TensorId | Edge
Edges = tuple[Edge, ...]
# Of nodes, tensors or operators.
Names = tuple[str, ...]
NameSet = frozenset[str]
# Of a text for people: notes, an account, the end of a log.
Lines = tuple[str, ...]
# With a number each: how many there are, or a type.
NumberedNames = tuple[tuple[str, int], ...]
# An object of a JSON or YAML file, as it is read or to be written.
JsonObject = dict[str, Any]
# Values of the configuration by their keys, as files, command lines and callers give them.
Settings = Mapping[str, Any]
# A node, a tensor or another subject -> why something is not done with it.
Causes = Mapping[str, str]
# An engine's options, or variables of its environment, as text.
EngineOptions = Mapping[str, str]
# Of a node's inputs or outputs, as of Edge.
Indices = tuple[int, ...]


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


class Mark(Enum):
    """A note on the type of a field, for the JSON that `onnxq.config.rows` makes of a dataclass."""

    WRITTEN = auto()  # written where it equals the default, too
    NONEMPTY = auto()  # text that must not be empty


# An entry of `onnxq.codes`.
Code = Annotated[str, Mark.NONEMPTY, Mark.WRITTEN]


def drop_repeats(items: Iterable[T]) -> tuple[T, ...]:
    """The items in their order, each once."""
    return tuple(dict.fromkeys(items))


@dataclass(frozen=True)
class Refusal:
    """A request that was denied."""

    # A node, tensor or site name.
    subject: str
    reason: str
    # The step a person can take; "" without one.
    fix: str = ""
    # The placement rule or check that refused.
    rule: str = ""
    code: Code = "R100"


@dataclass(frozen=True)
class LeftFloat:
    """A node that stays float because int8 would be slower, or because of a rule in the configuration."""

    # A node name.
    subject: str
    reason: str
    # The rule that leaves the node float.
    rule: str = ""
    code: Code = "F102"


Unquantized = Refusal | LeftFloat
UnquantizedNodes = tuple[Unquantized, ...]


def split_unquantized(entries: Iterable[Unquantized]) -> tuple[Refusals, LeftFloats]:
    """Separate refusals from float nodes; of several entries for one subject the first is kept."""
    first: dict[str, Unquantized] = {}
    for entry in entries:
        first.setdefault(entry.subject, entry)
    refusals = tuple(entry for entry in first.values() if isinstance(entry, Refusal))
    return refusals, tuple(entry for entry in first.values() if isinstance(entry, LeftFloat))


class Caution(str):
    """The text of a warning, with an entry of `onnxq.codes` as its `code`."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: str, text: str) -> Caution:
        """The text, which knows its code."""
        caution = super().__new__(cls, text)
        caution.code = code
        return caution

    # Pickle and copy pass these to __new__; str's own would leave out the code.
    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.code, str(self)


Refusals = tuple[Refusal, ...]
LeftFloats = tuple[LeftFloat, ...]
Cautions = tuple[Caution, ...]
