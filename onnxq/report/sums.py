"""Weights that can overflow 16-bit sums, and the resulting error, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from onnxq.report.columns import Text
from onnxq.report.terminal import View, format_decibel, make_table, select_rows

if TYPE_CHECKING:
    from onnxq.annotate import WeightSums
    from onnxq.engines.saturation.measure import Cost

# Rows of the table without `verbose`, and names in a sentence.
_SHOWN = 12
_NAMED = 3
_WHERE = "16-bit sums on x86 CPUs without VNNI"


def saturation_summary(weights: Sequence[WeightSums]) -> str:
    """Summarise in a line the weights that can saturate; "" if none can."""
    found = [one for one in weights if one.saturates]
    if not found:
        return ""
    rows, of = sum(one.rows for one in found), sum(one.all_rows for one in found)
    whose = f"{len(found)} weight{'s' if len(found) > 1 else ''}"
    return f"{rows} of {of} rows of {whose} can overflow {_WHERE}: {_join_names(found)}"


def explain_saturation(weights: Sequence[WeightSums]) -> str:
    """Explain a divergence of two runs by these weights; "" without any."""
    if not weights:
        return ""
    rows = sum(one.rows for one in weights)
    whose = (
        f"{len(weights)} weights ({_join_names(weights)})" if len(weights) > 1 else f"the weight of {weights[0].node}"
    )
    return f"saturates: {rows} row{'s' if rows != 1 else ''} of {whose} overflow {_WHERE}"


def _join_names(weights: Sequence[WeightSums]) -> str:
    names = list(dict.fromkeys(one.node for one in weights))
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def make_sums_tables(weights: Sequence[WeightSums], cost: Cost | None, view: View) -> Iterator[RenderableType]:
    """Make the table of weights that can overflow (verbose: of all weights), with the observed share if measured."""
    found = [one for one in weights if view.verbose or one.saturates]
    if not found:
        return
    counted = {one.node: one for one in cost.nodes} if cost is not None else {}
    rows = []
    shown, more = select_rows(found, view, _SHOWN)
    for one in shown:
        seen = counted.get(one.node)
        often = () if cost is None else (f"{100 * seen.share:.3g}%" if seen is not None else "",)
        note = (one.exact,) if view.verbose else ()
        rows.append(
            (one.node, one.op, one.weight, f"{one.rows}/{one.all_rows}", f"{one.sums}/{one.all_sums}", *often, *note)
        )
    columns = ("node", "op", "weight", "rows", "sums", *(("saturated",) if cost is not None else ()))
    columns += ("exact",) if view.verbose else ()
    right = ("rows", "sums", "saturated")
    yield make_table(columns, rows, right=right, names=("node", "weight"), fold=("exact",))
    if more:
        yield Text(more, style="dim")
    yield Text("")


def format_cost(cost: Cost) -> list[str]:
    """Format the error by saturation at each output, and the parts that could not be computed."""
    whose = f"on {cost.samples} samples, against exact sums"
    lines = [f"{one.output}: {format_decibel(one.sqnr_db)} {whose}, max abs {one.max_abs:.3g}" for one in cost.outputs]
    return lines + [f"[{one.code}] {one.subject}: {one.reason}" for one in cost.skipped]
