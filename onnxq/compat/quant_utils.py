"""Types and formats of onnxruntime.quantization, and its functions for tensors: its own, handed on."""

from __future__ import annotations

from typing import Any

from onnxq.compat.theirs import hand_on

__getattr__ = hand_on("quant_utils")
# The very members, so that what is handed on knows them.
QuantType: Any = __getattr__("QuantType")
QuantFormat: Any = __getattr__("QuantFormat")
