"""Checks of a configuration against the backends that there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxq import config as configurations
from onnxq.backends.limits import find_faults
from onnxq.backends.registry import find_target, list_engines, list_names, list_runnable, load_backend
from onnxq.config import Config
from onnxq.errors import ConfigError, Location
from onnxq.nearest import suggest_names


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


def list_registered(kind: str) -> list[str]:
    """The values of an option. kind: "backends", "engines", or "runnable" for backends whose models `diff` can run."""
    if kind == "runnable":
        return list_runnable()
    return [*(list_engines() if kind == "engines" else list_names())]


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
