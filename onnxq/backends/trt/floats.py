"""TensorRT in narrow float types: operators that it computes in float32 only.

Proved by building every ONNX operator with TensorRT-RTX 1.7 for SM86 in float32, float16 and bfloat16; those that fail
in a narrow type alone stand here. tests/backends/trt/test_floats.py builds them again.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.backends.base import Candidate
from onnxq.spec import FloatType

_ALL = ("Celu", "MeanVarianceNormalization", "Range")
# In bfloat16 its parser refuses these as well, and no compute capability has a transposed convolution.
_ONLY_FLOAT16 = (
    "ConvTranspose", "GRU", "GlobalLpPool", "HardSwish", "LpNormalization", "LpPool", "Mish", "RandomUniformLike",
    "RandomNormalLike", "Shrink",
)  # fmt: skip
MISSING: Mapping[FloatType, tuple[str, ...]] = {
    FloatType.FLOAT16: _ALL,
    FloatType.BFLOAT16: (*_ALL, *_ONLY_FLOAT16),
}


def refuse_narrow(c: Candidate, kind: FloatType) -> str:
    """Why TensorRT computes this node in float32 only; "" where it has a kernel for the type."""
    if c.node.op_type in MISSING[kind]:
        return f"TensorRT has no {kind} kernel for {c.node.op_type}"
    weight = c.shape(1)
    grouped = c.node.op_type in ("Conv", "ConvTranspose") and int(c.attr("group", 1)) > 1
    # TensorRT-RTX has them; TensorRT 11.2 ends the build, on Ada (NVIDIA/TensorRT#4838). Depthwise ones are others.
    if grouped and weight is not None and weight[0 if c.node.op_type == "ConvTranspose" else 1] > 1:
        return f"TensorRT 11.2 does not build some grouped convolutions in {kind}"
    return ""
