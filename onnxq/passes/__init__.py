"""Preparation: rewrites that leave the float function as it is and let engines find what they have kernels for.

Each pass keeps graph inputs and outputs, works in If/Loop/Scan bodies as in the main graph, leaves tensors with other
readers alone, never crosses existing Q/DQ pairs, and keeps names: what keeps its name keeps its value.
"""

from __future__ import annotations

from onnxq.passes.base import Context, PassEntry, PassReport, Prepared
from onnxq.passes.assembly.guards import guard_float
from onnxq.passes.assembly.matmul_bias import unfuse_matmul_bias
from onnxq.passes.rewrites.prepare import PASSES, prepare

__all__ = [
    "PASSES",
    "Context",
    "PassEntry",
    "PassReport",
    "Prepared",
    "guard_float",
    "prepare",
    "unfuse_matmul_bias",
]
