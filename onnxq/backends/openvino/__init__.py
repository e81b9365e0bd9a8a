"""OpenVINO on the CPU."""

from onnxq.backends.openvino.engine import OpenVinoEngine
from onnxq.backends.openvino.limits import LIMITS, SUMS
from onnxq.backends.openvino.rules import OPENVINO, OPENVINO_WEIGHT_ONLY
from onnxq.backends.registry import Backend

BACKEND = Backend(
    name="openvino",
    title="OpenVINO",
    modes={"static": OPENVINO, "weight-only": OPENVINO_WEIGHT_ONLY},
    engines=(OpenVinoEngine(),),
    sums=SUMS,
    limits=LIMITS,
    aliases=("openvino", "nncf"),
)
