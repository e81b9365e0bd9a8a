"""Qualcomm's NPU (Hexagon HTP), through ONNX Runtime's QNN execution provider."""

from onnxq.backends.qnn.engine import QnnEngine
from onnxq.backends.qnn.limits import LIMITS
from onnxq.backends.qnn.rules import QNN
from onnxq.backends.registry import Backend

BACKEND = Backend(
    name="qnn",
    title="Qualcomm HTP",
    modes={"static": QNN},
    engines=(QnnEngine(),),
    limits=LIMITS,
    aliases=("qnn",),
    formats=("aimet",),
)
