"""Limits of a backend, checked when a configuration is read, because file and line are known then.

The tables of targets decide node by node; here only values are refused that no node supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onnxq.config.model import Config
from onnxq.config.rules import RuleSet
from onnxq.spec import FLOAT8

# Observers that need no evenly spaced values, and FP8 values are not evenly spaced.
_RANGE_ONLY = ("minmax", "moving_average", "percentile")


@dataclass(frozen=True)
class Limit:
    """The allowed values of one field."""

    # Dotted path.
    path: str
    takes: Callable[[Config], bool]
    # What the engine does with other values.
    why: str
    fix: str


@dataclass(frozen=True)
class RuleLimit:
    """The allowed requests of a rule."""

    # Field of the request that does not fit; "" where all do.
    find: Callable[[RuleSet], str]
    why: str
    fix: str


OBSERVER = "weights.observer"
NO_CPU_KINDS = Limit(
    "cpu", lambda c: c.cpu == "any", "only the placement for ONNX Runtime goes by the kind of CPU",
    "remove it, or write `target: ort`",
)  # fmt: skip
NO_OPERATORS = Limit(
    "emit", lambda c: c.emit == "qdq", "only ONNX Runtime has the operator MatMulNBits",
    "remove it, or write `target: ort`",
)  # fmt: skip


def is_static(config: Config) -> bool:
    """True where activations have scales that stand in the file."""
    return config.mode in ("static", "auto")


def is_dynamic(config: Config) -> bool:
    """True where activations have scales of each run."""
    return config.mode in ("dynamic", "auto")


def has_positive_scales(config: Config) -> bool:
    """True where no scale of a weight may be negative."""
    return not dict(config.weights.observer.options).get("signed_scales", False)


def find_faults(
    config: Config, limits: tuple[Limit, ...], rule_limits: tuple[RuleLimit, ...]
) -> Iterator[tuple[str, str, str]]:
    """(path, cause, fix) of every value that the limits refuse, then of an observer that does not serve its type."""
    for limit in limits:
        if not limit.takes(config):
            yield limit.path, limit.why, limit.fix
    for k, rule in enumerate(config.rules):
        # The first rule that matches wins, so that nothing but the section stands below it.
        ruled = config.model_copy(update={"weights": config.weights.model_copy(update=rule.set.given())})
        for limit in limits:
            if limit.path == OBSERVER and rule.set.observer is not None and not limit.takes(ruled):
                yield f"rules[{k}].set.observer", limit.why, limit.fix
        for rule_limit in rule_limits:
            if field := rule_limit.find(rule.set):
                yield f"rules[{k}].set.{field}", rule_limit.why, rule_limit.fix
    activations = config.activations
    if activations.storage == FLOAT8 and activations.observer.name not in _RANGE_ONLY:
        cause = f"{activations.observer.name!r} weighs evenly spaced levels, and those of FP8 are not"
        yield "activations.observer", cause, f"use one of {', '.join(_RANGE_ONLY)}"
