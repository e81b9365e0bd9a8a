"""quantize(): the one orchestration, and the other commands' functions."""

from onnxq.annotate import Inspection
from onnxq.engines.diff_model import Difference
from onnxq.engines.proof import Proof
from onnxq.pipeline.api import annotate_bits, apply, import_calibration, inspect, make_plan, quantize
from onnxq.pipeline.differ import diff
from onnxq.pipeline.profiler import profile_model
from onnxq.pipeline.prover import prove
from onnxq.pipeline.result import Result
from onnxq.profile import Profile

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
