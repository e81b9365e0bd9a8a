"""ONNX Runtime's rules with the costs of its kernels in WebAssembly.

onnxruntime-web is ONNX Runtime, compiled for WebAssembly with its optimizer and all of its kernels, and 128-bit SIMD.
Measured on 1.30: its integer kernels are exact, whatever the types (tests/backends/web/test_engine.py).
"""

from __future__ import annotations

from dataclasses import replace

from onnxq.backends.base import Target, order_no_sums
from onnxq.backends.registry import NO_CPU_KINDS, find_reference
from onnxq.backends.web.costs import COSTS

_REFERENCE = find_reference()


def _adapt(target: Target) -> Target:
    return replace(
        target,
        name="web",
        costs=COSTS,
        sum_order=order_no_sums,
        times_itself=False,
        advice="try another observer (mse, percentile)",
    )


MODES = {mode: _adapt(target) for mode, target in _REFERENCE.modes.items()}
LIMITS = (*(limit for limit in _REFERENCE.limits if limit.path != "cpu"), NO_CPU_KINDS)
