"""The section `torch`, for the PyTorch front end only. The engine checks it and does not use it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from onnxq.config.values import Patterns, Section, format_named, read_named
from onnxq.spec import NamedOptions

# Words for the inputs of an operator; see MultiInput.
POLICIES = ("insert", "share", "follow", "none")


@dataclass(frozen=True)
class QuantizerSpec:
    """Name of the quantizer that learns or holds a site's scales, and its options as sorted (name, value) pairs."""

    name: str = "uniform"
    options: NamedOptions = ()


@dataclass(frozen=True)
class MultiInput:
    """Policy for the inputs of an operator that has several.

    insert: each has its own scale. share: all have the same one. follow: all have that of input number `leader`.
    none: this operator is no reason to quantize them.
    """

    policy: str
    leader: int = 0


def _read_policies(value: Any) -> Any:
    """Read {add: insert, cat: share, mul: {follow: 0}} as sorted pairs."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError(
            "multi_input", "must map operators to policies, e.g. {add: insert, cat: share}"
        )
    return tuple(sorted((str(op), _read_policy(str(op), word)) for op, word in value.items()))


def _read_policy(op: str, word: Any) -> MultiInput:
    match word:
        case {"follow": int(leader), **others} if not others and leader >= 0:
            if not isinstance(leader, bool):
                return MultiInput("follow", leader)
        case str() if word in POLICIES:
            return MultiInput(word)
    words = "insert, share, none, follow, or {follow: number of the input that leads}"
    raise PydanticCustomError("multi_input", "'{op}' must be {words}", {"op": op, "words": words})


def _write_policies(value: tuple[tuple[str, MultiInput], ...]) -> Any:
    return {op: {"follow": p.leader} if p.policy == "follow" else p.policy for op, p in value}


Quantizer = Annotated[
    QuantizerSpec, read_named("a quantizer", QuantizerSpec), PlainSerializer(format_named)
]
Policies = Annotated[
    tuple[tuple[str, MultiInput], ...],
    BeforeValidator(_read_policies),
    PlainSerializer(_write_policies),
]


class Trained(Section):
    """Training of one kind of tensor."""

    # uniform, lsq, lsq+, pact, dorefa, adaround, or one that the user registered.
    quantizer: Quantizer = QuantizerSpec()


class FrontEnd(Section):
    """The section `torch`."""

    weights: Trained = Trained()
    activations: Trained = Trained()
    # Names of modules that are not traced and stay float.
    skip_trace: Patterns = ()
    # Policies by operator, as sorted pairs so that the section hashes.
    multi_input: Policies = Field(default=())
    # Fold batch norms into the layer in front.
    fuse_bn: bool = True
    # Switch off the quantizer between two layers that run as one kernel.
    disable_redundant: bool = True

    def policy(self, op: str) -> MultiInput | None:
        """The policy written for this operator; None: the target decides."""
        return dict(self.multi_input).get(op)
