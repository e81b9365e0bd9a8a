"""The plan as a table: spec, rule and reason of each site, and the nodes that stay float."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from onnxq.plan import PlacementMethod, Plan, SitePlan, to_json
from onnxq.report.columns import Text
from onnxq.report.model import SiteLine
from onnxq.report.precision import format_precision
from onnxq.report.summary import format_reasons, format_roles
from onnxq.report.terminal import (
    View,
    format_scale,
    format_warning,
    join_lines,
    make_sheet,
    make_table,
    select_rows,
    show_result,
)
from onnxq.spec import PerBlock, PerChannel, QuantSpec

# Names of a list without `verbose`.
_NAMED = 4


def format_spec(spec: QuantSpec) -> str:
    """Format a spec: uint8 asymmetric; int8 symmetric per channel 0; int4 symmetric per 32 of axis 1; 5 bits in int8"""
    width = spec.storage if spec.fills_storage else f"{spec.bits} bits in {spec.storage}"
    grain = spec.granularity
    place = f" per channel {grain.axis}" if isinstance(grain, PerChannel) else ""
    if isinstance(grain, PerBlock):
        place = f" per {grain.size} of axis {grain.axis}"
    if spec.dynamic:
        return f"{width} at each run"
    return f"{width} {'symmetric' if spec.symmetric else 'asymmetric'}{place}{' narrow' if spec.narrow_range else ''}"


def placement_text(plan: Plan) -> str:
    """Describe the choice of the placement and of the type of attention: "measured: widest; attention float (…)"."""
    how, attention = plan.placement, plan.attention
    text = str(PlacementMethod.RULES if how is None else how.method)
    if how is not None and how.method is PlacementMethod.MEASURED:
        text += f": {how.candidate or 'none'}"
    if attention is None:
        return text
    figures = f"{attention.quantized_db:.1f} dB quantized, {attention.float_db:.1f} dB in float"
    return f"{text}; attention {attention.kind} ({figures}, on {attention.samples} held-back samples)"


def make_site_line(site: SitePlan) -> SiteLine:
    """Convert one site for reports and tables."""
    numbers = site.qparams
    scale = (
        format_scale(float(numbers.scale.min()), float(numbers.scale.max())) if numbers and numbers.scale.size else ""
    )
    return SiteLine(
        site=str(site.site),
        role=str(site.role),
        spec=format_spec(site.spec),
        scale=scale,
        rule=site.rule,
        reason=site.reason,
    )


def show_plan(plan: Plan, view: View = View()) -> None:
    """Print the plan as tables, or as the JSON that `apply` reads. `top`: number of sites to list."""
    show_result(view, lambda: to_json(plan), _make_parts(plan, view), map(format_warning, plan.warnings))


def _make_parts(plan: Plan, view: View) -> Iterator[RenderableType]:
    sites, more = select_rows(plan.sites, view)
    lines = [make_site_line(site) for site in sites]
    # The columns are fields of SiteLine; before calibration there are no scales.
    columns: tuple[str, ...] = ("site", "role", "spec", "rule")
    if plan.sites and plan.calibrated:
        columns = ("site", "role", "spec", "scale", "rule")
    if view.verbose:
        columns = (*columns, "reason")
    if lines:
        rows = (tuple(str(getattr(line, column)) for column in columns) for line in lines)
        yield make_table(columns, rows, names=("site",), fold=("spec", "rule", "reason"))
        if more:
            yield Text(more, style="dim")
        yield Text("")
    yield make_sheet(_make_rows(plan, view.verbose))


def _make_rows(plan: Plan, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    counts = format_roles(tuple(plan.by_role().items()))
    numbers = "with numbers" if plan.calibrated else "without numbers: calibration adds them"
    yield "plan", Text(f"{len(plan.sites)} sites for {plan.target}" + (f": {counts} ({numbers})" if plan.sites else ""))
    if plan.existing:
        yield "existing", Text(f"{len(plan.existing)} pairs that the model came with are kept")
    if plan.prepare:
        yield "prepare", Text(", ".join(plan.prepare))
    if plan.placement is not None:
        how, details = plan.placement, [placement_text(plan)]
        details += [f"cpu {how.cpu}"] if how.cpu else []
        details += [f"{name} {ratio:.2f} times as fast as float" for name, ratio in how.speedups.items()]
        yield "placement", Text(", ".join(details))
    for label, names in (("guarded", plan.float_nodes), ("kept", plan.kept)):
        if names:
            yield label, join_lines(names, verbose, _NAMED, ", ")
    if plan.refusals:
        yield "refused", Text(*format_reasons(plan.refusals, verbose))
    if plan.left_float:
        yield "left float", Text(*format_reasons(plan.left_float, verbose))
    if plan.precision is not None:
        yield "float types", Text(*format_precision(plan.precision, verbose))
    if plan.data:
        yield "data", Text(plan.data)
