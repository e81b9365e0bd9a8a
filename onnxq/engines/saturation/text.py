"""Sentences about weights that can saturate, shared by prove and diff."""

from __future__ import annotations

from collections.abc import Sequence

from onnxq.annotate.saturation import WeightSums

_NAMED = 3
SUMS = "16-bit sums on CPUs without VNNI"


def summary(weights: Sequence[WeightSums]) -> str:
    """Which weights can saturate, in a line; "" when none can."""
    found = [one for one in weights if one.saturates]
    if not found:
        return ""
    rows, of = sum(one.rows for one in found), sum(one.all_rows for one in found)
    whose = f"{len(found)} weight{'s' if len(found) > 1 else ''}"
    return f"{rows} of {of} rows of {whose} ({name_nodes(found)}) can overflow {SUMS}"


def explain(weights: Sequence[WeightSums]) -> str:
    """Why an engine parts at what these weights compute."""
    rows = sum(one.rows for one in weights)
    whose = "its weight" if len(weights) == 1 else f"{len(weights)} weights ({name_nodes(weights)})"
    return f"saturates: {rows} row{'s' if rows != 1 else ''} of {whose} overflow {SUMS}"


def name_nodes(weights: Sequence[WeightSums]) -> str:
    """The first few by node."""
    names = list(dict.fromkeys(one.node for one in weights))
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
