"""TensorRT, and TensorRT for RTX."""

from onnxq.backends.registry import Backend
from onnxq.backends.trt.engine import RtxEngine, TrtEngine
from onnxq.backends.trt.limits import LIMITS, RULE_LIMITS
from onnxq.backends.trt.rules import TRT, TRT_WEIGHT_ONLY

BACKEND = Backend(
    name="trt",
    title="TensorRT",
    modes={"static": TRT, "weight-only": TRT_WEIGHT_ONLY},
    # The first also builds where there is no GPU, so that it stands for both.
    engines=(RtxEngine(), TrtEngine()),
    limits=LIMITS,
    rule_limits=RULE_LIMITS,
    aliases=("tensorrt",),
    formats=("tensorrt",),
    plugin_advice="where it is a plugin of TensorRT, give `target='trt'`, which keeps it and all behind it as they are",
)
