"""Predicted times of nodes in ONNX Runtime, by kind of CPU.

Measured for x86 with and without VNNI. Nobody has measured an ARM: there is no table for it.
"""

from collections.abc import Mapping

from onnxq.backends.ort.costs.avx2 import AVX2
from onnxq.backends.ort.costs.base import Cost, CpuCosts, Moves, OpCase
from onnxq.backends.ort.costs.model import dequantize_us, op_cost, quantize_us
from onnxq.backends.ort.costs.vnni import VNNI

CPU_COSTS: Mapping[str, CpuCosts] = {"vnni": VNNI, "avx2": AVX2}


def list_cpu_costs(cpu: str) -> list[CpuCosts]:
    """The table of one kind of CPU; all of them for "any" and for kinds without one."""
    return [CPU_COSTS[cpu]] if cpu in CPU_COSTS else list(CPU_COSTS.values())


__all__ = [
    "AVX2",
    "CPU_COSTS",
    "VNNI",
    "Cost",
    "CpuCosts",
    "Moves",
    "OpCase",
    "dequantize_us",
    "list_cpu_costs",
    "op_cost",
    "quantize_us",
]
