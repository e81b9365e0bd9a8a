"""Names of onnxruntime.quantization: its scripts run with `onnxq.compat` in its place."""

from importlib import import_module
from typing import Any

from onnxq.compat.calibrate import CalibrationMethod
from onnxq.compat.options import CompatWarning
from onnxq.compat.quant_utils import QuantFormat, QuantType
from onnxq.compat.quantize import (
    DynamicQuantConfig,
    StaticQuantConfig,
    get_qdq_config,
    quantize,
    quantize_dynamic,
    quantize_static,
)
from onnxq.compat.shape_inference import quant_pre_process
from onnxq.compat.theirs import import_theirs
from onnxq.errors import ConfigError

__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "CompatWarning",
    "DynamicQuantConfig",
    "QuantFormat",
    "QuantType",
    "StaticQuantConfig",
    "get_qdq_config",
    "quant_pre_process",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
]

_RENAMED = {
    "matmul_4bits_quantizer": "matmul_nbits_quantizer, MatMulNBitsQuantizer in the place of MatMul4BitsQuantizer"
}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        fix = f"import {_RENAMED[name]}"
        raise ConfigError(f"onnxq.compat.{name}", "has another name in onnxruntime, and here", fix)
    # From our module of the same name, which warns of classes that quantize as theirs do.
    module = getattr(import_theirs(), name).__module__.replace(
        "onnxruntime.quantization", "onnxq.compat"
    )
    return getattr(import_module(module), name)
