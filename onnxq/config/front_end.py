"""The section `torch`: what only the PyTorch front end asks. The engine checks it and has no other use for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator
from pydantic_core import PydanticCustomError

from onnxq.config.values import Frozen, Patterns, check_options, checked_patterns

POLICIES = ("insert", "share", "follow", "none")


@dataclass(frozen=True)
class QuantizerSpec:
    """Which quantizer learns or holds a site's numbers, and its options as sorted (name, value) pairs."""

    name: str = "uniform"
    options: tuple[tuple[str, float | int | str | bool], ...] = ()


@dataclass(frozen=True)
class MultiInput:
    """How the inputs of an operator with several are quantized.

    insert: each with its own numbers; share: all with the same; follow: all with those of input number `leader`;
    none: not for this operator's sake.
    """

    policy: str
    leader: int = 0


def _quantizer(value: Any) -> Any:
    if isinstance(value, str):
        return QuantizerSpec(value)
    if isinstance(value, QuantizerSpec):
        return value
    options = dict(value) if isinstance(value, Mapping) else {}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise PydanticCustomError("quantizer", "a quantizer is a name, or a mapping with `name` and its options")
    check_options("quantizer", options)
    return QuantizerSpec(name, tuple(sorted(options.items())))


def _plain_quantizer(spec: QuantizerSpec) -> Any:
    return {"name": spec.name, **dict(spec.options)} if spec.options else spec.name


def _policies(value: Any) -> Any:
    """{add: insert, cat: share, mul: {follow: 0}} as sorted pairs."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("multi_input", "must map operators to policies, e.g. {add: insert, cat: share}")
    return tuple(sorted((str(op), _policy(str(op), word)) for op, word in value.items()))


def _policy(op: str, word: Any) -> MultiInput:
    if isinstance(word, Mapping) and set(word) == {"follow"}:
        leader = word["follow"]
        if isinstance(leader, int) and not isinstance(leader, bool) and leader >= 0:
            return MultiInput("follow", leader)
    elif word in POLICIES:
        return MultiInput(str(word))
    raise PydanticCustomError(
        "multi_input",
        "'{op}' must be {words}",
        {"op": op, "words": "insert, share, none, follow, or {follow: number of the input that leads}"},
    )


def _plain_policies(value: tuple[tuple[str, MultiInput], ...]) -> Any:
    return {op: {"follow": p.leader} if p.policy == "follow" else p.policy for op, p in value}


Quantizer = Annotated[QuantizerSpec, BeforeValidator(_quantizer), PlainSerializer(_plain_quantizer)]
Policies = Annotated[tuple[tuple[str, MultiInput], ...], BeforeValidator(_policies), PlainSerializer(_plain_policies)]


class Trained(Frozen):
    """One kind of tensor in the front end. quantizer: uniform, lsq, lsq+, pact, dorefa, adaround or the user's own."""

    quantizer: Quantizer = QuantizerSpec()


class FrontEnd(Frozen):
    """The section `torch`.

    skip_trace: modules (by name) that are not looked into and stay float. fuse_bn: fold batch norms into the layer in
    front. disable_redundant: switch off the quantizer between two layers that run as one kernel.
    """

    weights: Trained = Trained()
    activations: Trained = Trained()
    skip_trace: Patterns = ()
    multi_input: Policies = Field(default=())
    fuse_bn: bool = True
    disable_redundant: bool = True

    _check = field_validator("skip_trace")(checked_patterns)

    def policy(self, op: str) -> MultiInput | None:
        """What the person asked for this operator; None: the target's own way."""
        return dict(self.multi_input).get(op)
