"""Quantizers on and off: by kind, by name, and by what a pass decided."""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.config import did_you_mean, matches
from onnxq.errors import ConfigError, PlanError
from onnxq.sites import Role
from torch_frontend.quantizers import Quantizer

BY_HAND = "by hand: "


def by_kind(quantizers: Mapping[str, Quantizer], weights: bool, activations: bool) -> None:
    """The switches of all weights and of all activations."""
    for quantizer in quantizers.values():
        quantizer.enabled = weights if quantizer.role is Role.WEIGHT else activations


def matching(quantizers: Mapping[str, Quantizer], pattern: str) -> list[Quantizer]:
    """Quantizers whose site a glob, a /regular expression/ or the name itself selects. Raises ConfigError for none."""
    found = [quantizer for site, quantizer in quantizers.items() if matches(pattern, site)]
    if not pattern or not found:
        raise ConfigError(f"pattern {pattern!r}", "matches no site", did_you_mean(pattern, quantizers), code="Q309")
    return found


def disable(quantizers: Mapping[str, Quantizer], pattern: str, reason: str) -> list[Quantizer]:
    """Switch off for good; what a pass decided before keeps its reason."""
    found = matching(quantizers, pattern)
    for quantizer in found:
        if quantizer.disabled_reason is None:
            quantizer.disabled_reason = f"{BY_HAND}{reason}" if reason else BY_HAND.rstrip(": ")
    return found


def enable(quantizers: Mapping[str, Quantizer], pattern: str, *, force: bool) -> list[Quantizer]:
    """Undo `disable`. A pass's decision is undone only by force. Raises PlanError when that is all there is to undo."""
    found = matching(quantizers, pattern)
    mine = [q for q in found if q.disabled_reason is None or force or q.disabled_reason.startswith(BY_HAND[:7])]
    if not mine:
        held = found[0]
        raise PlanError(
            held.site, f"a pass switched it off: {held.disabled_reason}", "pass force=True to overrule it", code="Q409"
        )
    for quantizer in mine:
        quantizer.disabled_reason = None
    return mine
