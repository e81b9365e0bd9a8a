"""Uniform quantization with a fixed scale from an observer; the straight-through estimator passes gradients."""

from __future__ import annotations

from torch_frontend.quantizers.base import Quantizer
from torch_frontend.quantizers.registry import register_quantizer


@register_quantizer("uniform")
class Uniform(Quantizer):
    """Round to nearest; the gradient passes wherever x rounds to an integer of the range and is 0 outside."""
