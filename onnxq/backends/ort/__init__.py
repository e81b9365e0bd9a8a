"""ONNX Runtime on the CPU."""

from onnxq.backends.ort.engine import OrtEngine
from onnxq.backends.ort.limits import LIMITS, SUMS
from onnxq.backends.ort.rules import ORT, ORT_DYNAMIC, ORT_WEIGHT_ONLY
from onnxq.backends.registry import Backend

BACKEND = Backend(
    name="ort",
    title="ONNX Runtime",
    modes={"static": ORT, "dynamic": ORT_DYNAMIC, "auto": ORT, "weight-only": ORT_WEIGHT_ONLY},
    engines=(OrtEngine(),),
    sums=SUMS,
    limits=LIMITS,
    aliases=("onnxruntime",),
    reference=True,
)
