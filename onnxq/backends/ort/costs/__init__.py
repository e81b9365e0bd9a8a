"""Predicted times of nodes in ONNX Runtime, by kind of CPU.

Measured for x86 with and without VNNI; each kind has its numbers in a data file. Nobody has measured an ARM: it has no
table.
"""

from collections.abc import Mapping
from importlib import resources

from onnxq.backends.ort.costs.model import OrtCosts, parse_costs


def _read_costs(cpu: str) -> OrtCosts:
    return parse_costs(resources.files(__name__).joinpath(f"{cpu}.json").read_text(encoding="utf-8"))


CPU_COSTS: Mapping[str, OrtCosts] = {cpu: _read_costs(cpu) for cpu in ("vnni", "avx2")}

__all__ = ["CPU_COSTS", "OrtCosts", "parse_costs"]
