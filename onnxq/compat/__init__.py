"""Names of onnxruntime.quantization: its scripts run with `onnxq.compat` in its place."""

from typing import Any

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

_CALIBRATE = "quantize_static calibrates; for a cache of TensorRT, onnxq.import_calibration"
_CLASSES = "call quantize_static or quantize_dynamic"
_BLOCKS = 'call onnxq.quantize(model, config="ort-int4-weights")'
# Names there that have no counterpart -> the way to the same end.
_ABSENT = {
    **dict.fromkeys(
        ("CalibraterBase", "MinMaxCalibrater", "TensorData", "TensorsData", "create_calibrator"), _CALIBRATE
    ),
    **dict.fromkeys(("load_tensors_data", "save_tensors_data", "write_calibration_table"), _CALIBRATE),
    **dict.fromkeys(("CudaQuantizer", "ONNXQuantizer", "QDQQuantizer", "QuantizationMode"), _CLASSES),
    **dict.fromkeys(("matmul_4bits_quantizer", "matmul_nbits_quantizer", "matmul_bnb4_quantizer"), _BLOCKS),
    "qdq_loss_debug": "call onnxq.diff(float_model, model, data, overrides={'layers': True}), or onnxq.profile_model",
}


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ConfigError(f"onnxq.compat.{name}", "is not here, as onnxq works otherwise", _ABSENT[name])
    raise AttributeError(f"module 'onnxq.compat' has no attribute {name!r}")
