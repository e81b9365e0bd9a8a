"""Targets: the specs that each engine accepts, and where its pairs go."""

from dataclasses import replace

from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names
from onnxq.targets.base import (
    Candidate,
    Capability,
    Output,
    PlacementRule,
    Shape,
    Shapes,
    Target,
    describe_spec,
)
from onnxq.targets.ort import ORT, ORT_DYNAMIC, ORT_WEIGHT_ONLY
from onnxq.targets.trt import TRT, TRT_WEIGHT_ONLY
from onnxq.targets.virtual import VIRTUAL


def _without_pairs(engine: Target) -> Target:
    """The engine for mode `float`, which quantizes nothing."""
    return replace(engine, rules=(), capabilities=(), no_kernel={}, no_gain={}, costs=False, quantizes_alone=False)


# By name and mode of quantization.
TARGETS: dict[tuple[str, str], Target] = {
    ("ort", "float"): _without_pairs(ORT),
    ("trt", "float"): _without_pairs(TRT),
    ("virtual", "float"): _without_pairs(VIRTUAL),
    ("ort", "static"): ORT,
    ("ort", "dynamic"): ORT_DYNAMIC,
    ("ort", "auto"): ORT,
    ("ort", "weight-only"): ORT_WEIGHT_ONLY,
    ("trt", "static"): TRT,
    ("trt", "weight-only"): TRT_WEIGHT_ONLY,
    ("virtual", "static"): VIRTUAL,
    ("virtual", "weight-only"): VIRTUAL,
}


def find_target(name: str, mode: str = "static") -> Target:
    """The target of this name and mode. Raises ConfigError, with the nearest name, where there is none."""
    found = TARGETS.get((name, mode))
    if found is None:
        modes = [known for other, known in TARGETS if other == name]
        if modes:
            raise ConfigError(f"target {name!r}", f"has no mode {mode!r}", suggest_names(mode, modes), code="Q312")
        names = {known for known, _ in TARGETS}
        raise ConfigError(f"target {name!r}", "there is none of this name", suggest_names(name, names), code="Q312")
    return found


def check_target(config: Config) -> None:
    """Raise ConfigError, with file and line, for a target or mode that is not registered."""
    try:
        find_target(config.target, config.mode)
    except ConfigError as error:
        cause = f"{config.target!r}: {error.cause}"
        raise ConfigError(config.where("target"), cause, error.fix, code=error.code) from error


__all__ = [
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
    "find_target",
]
