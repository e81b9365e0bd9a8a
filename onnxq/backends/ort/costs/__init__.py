"""Predicted times of nodes in ONNX Runtime, by kind of CPU.

Measured for x86 with and without VNNI; each kind has its numbers in a data file. Nobody has measured an ARM: it has no
table.
"""

from collections.abc import Mapping
from importlib import resources

from onnxq.backends.ort.costs.base import Cost, CpuCosts, Moves, OpCase, parse_costs
from onnxq.backends.ort.costs.model import dequantize_us, op_cost, quantize_us


def _read_costs(cpu: str) -> CpuCosts:
    return parse_costs(resources.files(__name__).joinpath(f"{cpu}.json").read_text(encoding="utf-8"))


CPU_COSTS: Mapping[str, CpuCosts] = {cpu: _read_costs(cpu) for cpu in ("vnni", "avx2")}


def list_cpu_costs(cpu: str) -> list[CpuCosts]:
    """The table of one kind of CPU; all of them for "any" and for kinds without one."""
    return [CPU_COSTS[cpu]] if cpu in CPU_COSTS else list(CPU_COSTS.values())


__all__ = [
    "CPU_COSTS",
    "Cost",
    "CpuCosts",
    "Moves",
    "OpCase",
    "dequantize_us",
    "list_cpu_costs",
    "op_cost",
    "quantize_us",
]
