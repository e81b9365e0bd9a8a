"""quantize(): the one orchestration, and the other commands' functions, which load what they need at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxq.annotate import Inspection
from onnxq.pipeline.api import annotate_bits, apply, import_calibration, inspect, make_plan, quantize
from onnxq.pipeline.result import Result

if TYPE_CHECKING:
    from onnxq.engines.diff.model import Difference
    from onnxq.engines.prove.proof import Proof
    from onnxq.pipeline.differ import diff
    from onnxq.pipeline.profiler import profile_model
    from onnxq.pipeline.prover import prove
    from onnxq.profile import Profile

_HOME = {
    "Difference": "onnxq.engines.diff.model",
    "Profile": "onnxq.profile",
    "Proof": "onnxq.engines.prove.proof",
    "diff": "onnxq.pipeline.differ",
    "profile_model": "onnxq.pipeline.profiler",
    "prove": "onnxq.pipeline.prover",
}

__all__ = [
    "Difference",
    "Inspection",
    "Profile",
    "Proof",
    "Result",
    "annotate_bits",
    "apply",
    "diff",
    "import_calibration",
    "inspect",
    "make_plan",
    "profile_model",
    "prove",
    "quantize",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
