"""Predicted times of nodes in ONNX Runtime, by kind of CPU.

Measured for x86 with and without VNNI. Nobody has measured an ARM: there is no table for it.
"""

from collections.abc import Mapping

from onnxq.targets.costs.avx2 import AVX2
from onnxq.targets.costs.base import Cost, CpuCosts, Moves, OpCase
from onnxq.targets.costs.model import dequantize_us, op_cost, quantize_us
from onnxq.targets.costs.vnni import VNNI

CPU_COSTS: Mapping[str, CpuCosts] = {"vnni": VNNI, "avx2": AVX2}

__all__ = [
    "AVX2",
    "CPU_COSTS",
    "VNNI",
    "Cost",
    "CpuCosts",
    "Moves",
    "OpCase",
    "dequantize_us",
    "op_cost",
    "quantize_us",
]
