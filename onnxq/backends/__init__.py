"""Targets: the specs that each engine accepts, and where its pairs go."""

from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from onnxq.backends.base import (
    Candidate,
    Capability,
    Output,
    PlacementRule,
    Shape,
    Shapes,
    Target,
    describe_spec,
)
from onnxq.backends.ort.rules import ORT, ORT_DYNAMIC, ORT_WEIGHT_ONLY
from onnxq.backends.trt.rules import TRT, TRT_WEIGHT_ONLY
from onnxq.backends.virtual.rules import VIRTUAL
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names

# Quantizes nothing; only float types are chosen.
_FLOAT = "float"


def _without_pairs(engine: Target) -> Target:
    """The engine for mode `float`, which quantizes nothing."""
    return replace(engine, rules=(), capabilities=(), no_kernel={}, no_gain={}, costs=False, quantizes_alone=False)


# By name and mode of quantization. Mode `float` follows from them.
TARGETS: dict[tuple[str, str], Target] = {
    ("ort", "static"): ORT,
    ("ort", "dynamic"): ORT_DYNAMIC,
    ("ort", "auto"): ORT,
    ("ort", "weight-only"): ORT_WEIGHT_ONLY,
    ("trt", "static"): TRT,
    ("trt", "weight-only"): TRT_WEIGHT_ONLY,
    ("virtual", "static"): VIRTUAL,
    ("virtual", "weight-only"): VIRTUAL,
}


# Entry points of packages that add a target: its name, and a mapping of modes to targets.
GROUP = "onnxq.backends"


def list_names() -> tuple[str, ...]:
    """The names of all targets, those of other packages too."""
    return tuple(sorted({name for name, _ in TARGETS} | entry_points(group=GROUP).names))


def find_modes(name: str) -> dict[str, Target]:
    """The target of this name in each of its modes; empty where there is none. Loads that of another package.

    Raises ConfigError for a package that cannot be loaded.
    """
    if all(name != known for known, _ in TARGETS):
        for entry in entry_points(group=GROUP, name=name):
            TARGETS.update({(name, mode): target for mode, target in _load(entry).items()})
    return {mode: target for (known, mode), target in TARGETS.items() if known == name}


def _load(entry: EntryPoint) -> dict[str, Target]:
    try:
        return dict(entry.load())
    # Whatever the code of another package raises.
    except Exception as error:
        cause = f"its package cannot be loaded from {entry.value}: {type(error).__name__}: {error}"
        fix = f"mend or remove the package; its entry point of {GROUP} must name a mapping of modes to targets"
        raise ConfigError(f"target {entry.name!r}", cause, fix, code="Q312") from error


def find_target(name: str, mode: str = "") -> Target:
    """The target of this name and mode. Raises ConfigError, with the nearest name, where there is none.

    mode: "" for what is the same in all modes.
    """
    modes = find_modes(name)
    if not modes:
        fix = suggest_names(name, list_names())
        raise ConfigError(f"target {name!r}", "there is none of this name", fix, code="Q312")
    if mode not in ("", _FLOAT, *modes):
        fix = suggest_names(mode, {_FLOAT, *modes})
        raise ConfigError(f"target {name!r}", f"has no mode {mode!r}", fix, code="Q312")
    found = modes.get(mode) or modes.get("static") or next(iter(modes.values()))
    return _without_pairs(found) if mode == _FLOAT else found


def check_target(config: Config) -> None:
    """Raise ConfigError, with file and line, for a target or mode that is not registered."""
    try:
        find_target(config.target, config.mode)
    except ConfigError as error:
        cause = f"{config.target!r}: {error.cause}"
        raise ConfigError(config.where("target"), cause, error.fix, code=error.code) from error


__all__ = [
    "GROUP",
    "TARGETS",
    "Candidate",
    "Capability",
    "Output",
    "PlacementRule",
    "Shape",
    "Shapes",
    "Target",
    "check_target",
    "describe_spec",
    "find_modes",
    "find_target",
    "list_names",
]
