"""Targets: the specs that each engine accepts, and where its pairs go."""

from onnxq.errors import ConfigError
from onnxq.targets.base import (
    USUAL_DOMAINS,
    Candidate,
    Capability,
    Output,
    PlacementRule,
    Shape,
    Shapes,
    Target,
    describe_spec,
)
from onnxq.targets.ort import ORT, ORT_WEIGHT_ONLY
from onnxq.targets.trt import TRT, TRT_WEIGHT_ONLY
from onnxq.targets.virtual import VIRTUAL

# By name and mode of quantization.
TARGETS: dict[tuple[str, str], Target] = {
    ("ort", "static"): ORT,
    ("ort", "weight-only"): ORT_WEIGHT_ONLY,
    ("trt", "static"): TRT,
    ("trt", "weight-only"): TRT_WEIGHT_ONLY,
    ("virtual", "static"): VIRTUAL,
    ("virtual", "weight-only"): VIRTUAL,
}


def find_target(name: str, mode: str = "static") -> Target:
    """The target of this name and mode. Raises ConfigError naming those there are."""
    found = TARGETS.get((name, mode))
    if found is None:
        names = sorted({known for known, _ in TARGETS})
        raise ConfigError(
            f"target {name!r}", f"unknown for mode {mode!r}", f"use one of {', '.join(names)}", code="Q312"
        )
    return found


__all__ = [
    "TARGETS",
    "USUAL_DOMAINS",
    "Candidate",
    "Capability",
    "Output",
    "PlacementRule",
    "Shape",
    "Shapes",
    "Target",
    "describe_spec",
    "find_target",
]
