"""Switch quantizers on and off: by kind, and for good by the pattern of their sites."""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.config import matches_any, suggest_names
from onnxq.errors import ConfigError, PlanError
from onnxq.sites import Role
from torch_frontend.quantizers import DisabledBy, Quantizer


def switch_kinds(quantizers: Mapping[str, Quantizer], weights: bool, activations: bool) -> None:
    """Set the switches of all weights and of all activations."""
    for quantizer in quantizers.values():
        quantizer.enabled = weights if quantizer.role is Role.WEIGHT else activations


def find_matching(quantizers: Mapping[str, Quantizer], pattern: str) -> list[Quantizer]:
    """Quantizers whose sites match a name, a glob or a /regular expression/. Raises ConfigError if there are none."""
    found = [quantizer for site, quantizer in quantizers.items() if matches_any(pattern, site)]
    if not pattern or not found:
        raise ConfigError(f"pattern {pattern!r}", "matches no site", suggest_names(pattern, quantizers), code="Q309")
    return found


def disable_sites(quantizers: Mapping[str, Quantizer], pattern: str, reason: str) -> list[Quantizer]:
    """Switch the matching sites off for good; return all of them."""
    found = find_matching(quantizers, pattern)
    for quantizer in found:
        # An earlier decision keeps its reason: undoing the user's own must not undo a pass's.
        if quantizer.disabled_reason is None:
            quantizer.disabled_reason = f"by hand: {reason}" if reason else "by hand"
            quantizer.disabled_by = DisabledBy.USER
    return found


def enable_sites(quantizers: Mapping[str, Quantizer], pattern: str, *, force: bool) -> list[Quantizer]:
    """Undo `disable_sites` for the matching sites; return those that may quantize again.

    force: undo decisions of passes, too. Raises PlanError if passes decided on all matching sites and force is False.
    """
    found = find_matching(quantizers, pattern)
    # Sites that nobody disabled are fine, too: a pattern may match more than it undoes.
    mine = [q for q in found if q.disabled_reason is None or force or q.disabled_by is DisabledBy.USER]
    if not mine:
        held = found[0]
        raise PlanError(
            held.site, f"a pass switched it off: {held.disabled_reason}", "pass force=True to overrule it", code="Q409"
        )
    for quantizer in mine:
        quantizer.disabled_reason, quantizer.disabled_by = None, DisabledBy.PASS
    return mine
