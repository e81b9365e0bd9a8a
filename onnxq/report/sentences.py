"""Sentences on parts of results that several commands show: specs, placements, passes, float types, 16-bit sums."""

from collections.abc import Iterator, Sequence

from onnxq.annotate import WeightSums
from onnxq.engines.saturation import SaturationCost
from onnxq.passes.journal import Outcome, PassReport, Shortage, Shortened
from onnxq.plan import KeepReason, KeptFloat32, PlacementMethod, Plan, PrecisionPlan, SitePlan
from onnxq.planner import Forced
from onnxq.report import terminal
from onnxq.report.columns import Text
from onnxq.report.model import SiteLine
from onnxq.report.record import MOST_DB
from onnxq.sites import Refusal, Unquantized
from onnxq.spec import FloatType, QuantSpec, describe_granularity
from onnxq.wording import group_by_text, join_names, translate_text

# Reasons of a list, and names of a reason, without `verbose`.
_REASONS = 6
_MEMBERS = 2
_KEPT = 3
# Rows of the table of sums without `verbose`, and names in a sentence.
_SUMS = 12
_NAMED = 3
_WHERE = "16-bit sums on x86 CPUs without VNNI"
_PLURALS = {"activation": "activations", "weight": "weights", "bias": "biases", "output": "outputs"}


def format_spec(spec: QuantSpec) -> str:
    """Format a spec: uint8 asymmetric; int8 symmetric per channel 0; int4 symmetric per 32 of axis 1; 5 bits in int8"""
    width = spec.storage if spec.fills_storage else f"{spec.bits} bits in {spec.storage}"
    if spec.dynamic:
        return f"{width} at each run"
    text = f"{width} {spec.scheme}{describe_granularity(spec.granularity)}"
    return f"{text}{' narrow' * spec.narrow_range}{' footroom' * spec.footroom}"


def placement_text(plan: Plan) -> str:
    """Describe the choice of the placement and of the type of attention: "measured: widest; attention float (…)"."""
    how = plan.placement
    attention = plan.attention
    text = str(PlacementMethod.RULES if how is None else how.method)
    if how is not None and how.method is PlacementMethod.MEASURED:
        text += f": {how.candidate or 'none'}"
    if attention is None:
        return text
    figures = f"{attention.quantized_db:.1f} dB quantized, {attention.float_db:.1f} dB in float"
    return (
        f"{text}; attention {attention.kind} ({figures}, on {attention.samples} held-back samples)"
    )


def make_site_line(site: SitePlan) -> SiteLine:
    """Convert one site for reports and tables."""
    scale = ""
    if site.qparams and site.qparams.scale.size:
        scales = site.qparams.scale
        scale = terminal.format_scale(float(scales.min()), float(scales.max()))
    return SiteLine(
        site=site.name,
        role=str(site.role),
        spec=format_spec(site.spec),
        scale=scale,
        rule=site.rule,
        reason=site.reason,
    )


def format_reasons(nodes: Sequence[Unquantized], verbose: bool) -> Iterator[str]:
    """Yield lines on unquantized nodes by reason: number, reason, fix; with `verbose` every subject."""
    groups = group_by_text(nodes, lambda node: node.reason)
    for reason, members in groups if verbose else groups[:_REASONS]:
        names = join_names(
            [member.subject for member in members], len(members) if verbose else _MEMBERS
        )
        yield f"{len(members)} x [{members[0].code}] {translate_text(reason)} ({names})"
        for fix in sorted(
            {member.fix for member in members if isinstance(member, Refusal) and member.fix}
        ):
            yield f"    fix: {translate_text(fix)}"
    if not verbose and len(groups) > _REASONS:
        yield f"and {len(groups) - _REASONS} more reasons; {translate_text(terminal.MORE)}"


def format_forced(forced: Forced) -> str:
    """Format what rules that force operators cost: number, names, predicted time."""
    count = f"{terminal.format_count(len(forced.names), 'operator')} by rules ({join_names(forced.names, _MEMBERS)})"
    return f"{count}: predicted {forced.slowdown:.2f}x the time of the choice without them"


def format_roles(roles: Sequence[tuple[str, int]]) -> str:
    """Format counts of roles: 60 activations, 50 weights, 1 bias."""
    return ", ".join(
        f"{count} {role if count == 1 else _PLURALS.get(role, role)}"
        for role, count in roles
        if count
    )


def describe_rewrite(report: PassReport) -> str:
    """A line for a rewrite that changed something."""
    more = f", … {len(report.changed)} in all" if len(report.changed) > 1 else ""
    return f"{report.name}: {report.changed[0]}{more}"


def describe_pass(report: PassReport) -> str:
    """A line for a pass: what it did and the figures of its trial, or why it was rolled back or left out."""
    return f"{report.name}: {_describe(report)}"


def _describe(report: PassReport) -> str:
    figures = (
        ""
        if report.trial_db is None
        else f"{report.trial_db[0]:.1f} to {report.trial_db[1]:.1f} dB in a trial"
    )
    change = "" if report.difference is None else f"max |difference| {report.difference:.3g}"
    if report.outcome is Outcome.KEPT:
        return ", ".join(filter(None, (*report.changed[:1], change, figures)))
    if report.outcome is Outcome.NO_GAIN:
        return ": ".join(("nothing to gain", *report.changed[:1]))
    if report.outcome is Outcome.NOT_EQUIVALENT:
        return f"rolled back: it changed the float outputs, {change}"
    return f"rolled back: {figures}" if figures else "rolled back: no trial could judge it"


def describe_shortage(shortened: Shortened) -> str:
    """A line for something that the budget of time cut short."""
    name = shortened.name
    budget = terminal.format_seconds(shortened.budget)
    seconds = terminal.format_seconds(shortened.seconds)
    if shortened.how is Shortage.GIVEN_UP:
        return f"budget: {name}: given up after its {seconds} of the budget of {budget}"
    if shortened.how is Shortage.EXCEEDED:
        return f"budget: the budget of {budget} was too small: {seconds} is the least it takes"
    change = "left out"
    if shortened.how is Shortage.FEWER_SAMPLES:
        change = f"{shortened.samples[0]} of {shortened.samples[1]} samples"
    return f"budget: {name}: {change}, the budget of {budget} leaves no time for more"


def format_precision(types: PrecisionPlan | None, verbose: bool) -> Iterator[str]:
    """Lines on the type, on inputs and outputs, and on every reason with the nodes it holds for."""
    if types is None:
        return
    if types.type is not FloatType.FLOAT32:
        kept = f", {len(types.kept)} stay in float32" if types.kept else ""
        yield f"{types.nodes} nodes compute in {types.type}{kept}"
    groups = group_by_text(types.kept, lambda node: _explain_float32(node, types.type))
    for reason, members in groups:
        names = list(map(_name_float32, members))
        yield f"{len(names)} x float32: {reason} ({join_names(names, len(names) if verbose else _KEPT)})"
    if types.limited:
        nodes = dict.fromkeys(edge.node for edge in types.limited)
        yield f"{len(nodes)} x masks limited to what {types.type} holds, in front of a Softmax ({next(iter(nodes))})"
    if types.io is not None:
        yield f"inputs and outputs are {types.io}"


def _name_float32(node: KeptFloat32) -> str:
    if node.reason in (KeepReason.OVERFLOW, KeepReason.SUM, KeepReason.SMALL, KeepReason.SCALE):
        return f"{node.node}: {node.figure:.2g}"
    # One that rounds nothing has no figure: a plan holds a number far beyond any dB in the place of infinity.
    if node.reason in (KeepReason.PRECISION, KeepReason.TRIAL) and node.figure < MOST_DB:
        return f"{node.node}: {node.figure:.0f} dB"
    return node.node


# kind, largest, smallest: the type that the others compute in and its limits; detail: of the node.
_FLOAT32_REASONS = {
    KeepReason.OVERFLOW: "values near or beyond the largest {kind}, {largest:.5g}",
    KeepReason.SUM: "what it adds up may pass the largest {kind}, {largest:.5g}",
    KeepReason.SMALL: "values too small for {kind}, which loses digits below {smallest:.2g}",
    KeepReason.PRECISION: "with inputs rounded to {kind} it makes something else",
    KeepReason.SCALE: "a scale of what it reads is below {smallest:.2g}, where {kind} loses digits",
    KeepReason.EXISTING: "it reads a pair that the model came with, whose numbers stay as they are",
    KeepReason.KERNEL: "{detail}",
    KeepReason.ONNX: "no {kind} operator in ONNX, or of unknown type",
    KeepReason.SHAPES: "arithmetic on shapes and positions",
    KeepReason.RULE: "{detail}",
    KeepReason.UNSEEN: "no sample ran it, so its values are unknown",
    KeepReason.CASTS: "between such nodes: Casts around it would cost more",
    KeepReason.TRIAL: "the answers were worse without it",
}


def _explain_float32(node: KeptFloat32, kind: FloatType) -> str:
    text = _FLOAT32_REASONS[node.reason]
    return text.format(kind=kind, largest=kind.largest, smallest=kind.smallest, detail=node.detail)


def saturation_summary(weights: Sequence[WeightSums]) -> str:
    """Summarise in a line the weights that can saturate; "" if none can."""
    saturating = [weight for weight in weights if weight.saturates]
    if not saturating:
        return ""
    rows = sum(weight.rows for weight in saturating)
    total = sum(weight.all_rows for weight in saturating)
    count = terminal.format_count(len(saturating), "weight")
    return f"{rows} of {total} rows of {count} can overflow {_WHERE}: {_join_nodes(saturating)}"


def explain_saturation(weights: Sequence[WeightSums]) -> str:
    """Explain a divergence of two runs by these weights; "" without any."""
    if not weights:
        return ""
    owner = f"the weight of {weights[0].node}"
    if len(weights) > 1:
        owner = f"{len(weights)} weights ({_join_nodes(weights)})"
    rows = terminal.format_count(sum(weight.rows for weight in weights), "row")
    return f"saturates: {rows} of {owner} overflow {_WHERE}"


def _join_nodes(weights: Sequence[WeightSums]) -> str:
    return join_names(list(dict.fromkeys(weight.node for weight in weights)), _NAMED)


def make_sums_tables(
    weights: Sequence[WeightSums], cost: SaturationCost | None, view: terminal.TextView
) -> terminal.Parts:
    """Make the table of weights that can overflow (verbose: of all weights), with the observed share if measured."""
    listed = [weight for weight in weights if view.verbose or weight.saturates]
    if not listed:
        return
    columns = ["node", "op", "weight", "rows", "sums"]
    shares = {}
    if cost is not None:
        columns.append("saturated")
        shares = {node.node: f"{100 * node.share:.3g}%" for node in cost.nodes}
    if view.verbose:
        columns.append("exact")

    def make_row(weight: WeightSums) -> Sequence[str]:
        counts = f"{weight.rows}/{weight.all_rows}", f"{weight.sums}/{weight.all_sums}"
        cells = [weight.node, weight.op, weight.weight, *counts]
        if cost is not None:
            cells.append(shares.get(weight.node, ""))
        if view.verbose:
            cells.append(weight.exact)
        return cells

    names = ("node", "weight")
    right = ("rows", "sums", "saturated")
    yield from terminal.make_list(
        listed, view, columns, make_row, usual=_SUMS, right=right, names=names, fold=("exact",)
    )
    yield Text()


def format_cost(cost: SaturationCost) -> list[str]:
    """Format the error by saturation at each output, and the parts that could not be computed."""
    basis = f"on {cost.samples} samples, against exact sums"
    lines = [
        f"{error.output}: {terminal.format_decibel(error.sqnr_db)} {basis}, max abs {error.max_abs:.3g}"
        for error in cost.outputs
    ]
    return lines + [
        f"[{refusal.code}] {refusal.subject}: {refusal.reason}" for refusal in cost.skipped
    ]
