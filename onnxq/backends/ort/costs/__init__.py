"""Predicted times of nodes in ONNX Runtime, by kind of CPU.

Measured for x86 with and without VNNI. Nobody has measured an ARM: there is no table for it.
"""

from collections.abc import Mapping

from onnxq.backends.ort.costs.avx2 import AVX2
from onnxq.backends.ort.costs.model import OrtCosts
from onnxq.backends.ort.costs.vnni import VNNI

CPU_COSTS: Mapping[str, OrtCosts] = {"vnni": VNNI, "avx2": AVX2}

__all__ = ["AVX2", "CPU_COSTS", "VNNI", "OrtCosts"]
