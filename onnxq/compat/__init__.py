"""Names of onnxruntime.quantization: its scripts run with `onnxq.compat` in its place."""

from onnxq.compat.calibrate import CalibrationDataReader, CalibrationMethod
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
