"""Types and formats of onnxruntime.quantization, and its functions for tensors: its own, handed on."""

from onnxq.compat.theirs import hand_on, take_choices

__getattr__ = hand_on("quant_utils")
# The very members, so that what is handed on knows them.
QuantType = take_choices(
    "quant_utils", "QuantType", "QInt8 QUInt8 QFLOAT8E4M3FN QInt16 QUInt16 QInt4 QUInt4"
)
QuantFormat = take_choices("quant_utils", "QuantFormat", "QOperator QDQ")
