"""Limits of a backend, checked when a configuration is read, because file and line are known then.

The tables of targets decide node by node; here only values are refused that no node supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxq import config as configurations
from onnxq.backends.registry import find_target, list_engines, list_names, list_runnable, load_backend
from onnxq.config import Config
from onnxq.config.rules import RuleSet
from onnxq.errors import ConfigError, Location
from onnxq.nearest import suggest_names
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


def load_config(
    source: str | Path | Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
) -> Config:
    """Read a preset by name or a YAML file by path. None is the preset of the target; a Config is used as it is.

    overrides: values by dotted path ("data.samples") or nested; None means not given. target: of files that name none,
    by default `ort`. A file extends a preset or another file by `extends:`, or else the preset of its target; its own
    rules, libraries and plugins come before the inherited ones.
    Raises ConfigError for unknown keys and values, and for those that the target does not support, with file, line,
    dotted path and the nearest name.
    """
    return check_limits(configurations.load_config(source, overrides, target=target))


def check_target(config: Config) -> None:
    """Raise ConfigError, with file and line, for a target or mode that is not registered."""
    try:
        find_target(config.target, config.mode)
    except ConfigError as error:
        cause = f"{config.target!r}: {error.cause}"
        raise ConfigError(config.where("target"), cause, error.fix, code=error.code) from error


def check_limits(config: Config) -> Config:
    """Return the configuration. Raises ConfigError with file, line and path of a value its target does not support,
    and of a name that no engine has.
    """
    backend = load_backend(config.target)
    limits = ((), ()) if backend is None else (backend.limits, backend.rule_limits)
    for path, cause, fix in find_faults(config, *limits):
        raise ConfigError(_locate_field(config, path), cause, fix, code="Q307")
    for path in ("prove.engine", "bench.engine"):
        name = getattr(config, path.partition(".")[0]).engine
        if name is not None:
            _check_name(config, path, name, list_engines())
    for k, name in enumerate(config.diff.engines):
        _check_name(config, f"diff.engines[{k}]", name, list_runnable())
    return config


def list_registered(kind: str) -> dict[str, str]:
    """The values of an option, with the devices of engines.

    kind: "backends", "engines", or "runnable" for backends whose models `diff` can run.
    """
    if kind == "engines":
        return {name: engine.place for name, engine in list_engines().items()}
    return dict.fromkeys(list_runnable() if kind == "runnable" else list_names(), "")


def _check_name(config: Config, path: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        cause = f"{name!r} is not one of {', '.join(names)}"
        place = config.find_place(path) or config.find_place(path.partition("[")[0]) or Location(config.source)
        raise ConfigError(place / path, cause, suggest_names(name, names), code="Q304")


def _locate_field(config: Config, path: str) -> Location:
    """`file:line: path` of the field. The line is that of its section, or of `target`, if the field was not written."""
    section = path.rpartition(".")[0]
    places = (config.find_place(written) for written in (path, section, "target"))
    return next((place for place in places if place is not None), Location("")) / path
