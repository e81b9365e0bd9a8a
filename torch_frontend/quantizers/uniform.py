"""Fixed scale from an observer; the straight-through estimator trains what stands around it."""

from __future__ import annotations

from torch_frontend.quantizers.base import Quantizer
from torch_frontend.quantizers.registry import register_quantizer


@register_quantizer("uniform")
class Uniform(Quantizer):
    """Nearest level; the gradient passes wherever x rounds to a level and is cut outside."""
