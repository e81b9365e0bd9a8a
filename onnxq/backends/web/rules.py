"""ONNX Runtime's rules with the costs of its kernels in WebAssembly.

onnxruntime-web is ONNX Runtime, compiled for WebAssembly with its optimizer, its kernels and SIMD of 128 bits.
"""

import json
from dataclasses import replace
from importlib import resources

from onnxq.backends.base import OperatorTable, Target
from onnxq.backends.registry import NO_CPU_KINDS, find_reference
from onnxq.backends.web.costs import COSTS, fits_matrix

_REFERENCE = find_reference()
# Results that take as long to clamp as one kernel more takes to start.
_MANY = 1024


def _adapt(target: Target) -> Target:
    """The target with costs of its own. Sums are exact in WebAssembly (1.30), and 16-bit ones are kept all the same:

    Node.js runs files of pages with ONNX Runtime's native kernels, too. Kernels clamp each result with a branch, which
    is mispredicted where about half are negative: so activations behind them are computed apart.
    """
    rules = tuple(
        replace(rule, footroom=_MANY if rule.compute and rule.fuses else 0) for rule in target.rules
    )
    return replace(
        target,
        name="web",
        rules=rules,
        costs=COSTS,
        times_itself=False,
        advice=Target.advice,
        fits_matrix=fits_matrix,
    )


def _read_webgpu() -> OperatorTable:
    table = json.loads(
        resources.files(__package__).joinpath("webgpu.json").read_text(encoding="utf-8")
    )
    return OperatorTable(**{**table, "operators": frozenset(table["operators"])})


WEBGPU = _read_webgpu()
MODES = {mode: _adapt(target) for mode, target in _REFERENCE.modes.items()}
LIMITS = (*(limit for limit in _REFERENCE.limits if limit.path != "cpu"), NO_CPU_KINDS)
