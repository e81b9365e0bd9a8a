"""Qualcomm's NPU, the HTP of Snapdragon chips, which is emulated on other machines."""

from onnxq.backends.base import Target
from onnxq.backends.qnn.engine import QnnEngine
from onnxq.backends.registry import Backend

BACKEND = Backend(
    name="qnn",
    title="Qualcomm HTP",
    modes={"static": Target(name="qnn", rules=(), capabilities=())},
    engines=(QnnEngine(),),
)
