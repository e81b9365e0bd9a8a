"""The passes that round weights: on a few samples, by somebody's own function, and the searches of effort `high`.

A rounder is any callable of the prepared float model, the plan after sequential rounding and the samples it was made
with. It gives its results block by block, in the order the model runs; each is kept where the outputs of the quantized
model come nearer to float on samples held back from both. The engine knows nothing of how the values were found:

    from onnxq.passes.rounding.passes import ExternalRounding, register_rounder

    def rounder(proto, plan, samples):
        for block in blocks_of(proto):
            yield ExternalRounding(block.name, {site: levels, ...})

    register_rounder("brecq", rounder)          # then: onnxq.quantize(model, data, effort="high")
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from onnxq.arrays import Array, as_float32
from onnxq.calibrate.constants import Numbers
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, ModelLike, attach_weights, ensure_opset
from onnxq.numerics import limit_sums
from onnxq.passes.base import Pass, SampledContext, Stage, has_real_samples, run_stage
from onnxq.passes.journal import Outcome, PassReport, list_replaced, report_changes
from onnxq.passes.judging import THRESHOLDS, Trial, has_few_bits
from onnxq.passes.rounding.layerwise import augment_samples, take_enough
from onnxq.passes.rounding.operators import Operator, list_operators
from onnxq.passes.rounding.sequential import RoundingOptions, SequentialRounding, round_sequentially
from onnxq.passes.rounding.strategies import SEARCHED
from onnxq.passes.state import Note, PlacedState, PlacedStep
from onnxq.passes.time_budget import Timers
from onnxq.plan import BiasPlan, Plan, SitePlan
from onnxq.planner.sums import count_saturating
from onnxq.runtime import Feeds
from onnxq.sites import Edge, Lines, NameSet, Role, Site


@dataclass(frozen=True, eq=False)
class ExternalRounding:
    """One block's better numbers. Sites and edges are those of the plan; sites not named stay as they were.

    levels: weight -> quantized values of its shape, within its spec's limits. Where the site has `sum_orders`, those
        that break a sum (`onnxq.numerics.weights`) are moved.
    numbers: weight -> scale and zero point, where they changed too.
    biases: input that reads a float bias -> its values.
    """

    block: str
    levels: Mapping[Site, Array]
    numbers: Numbers = field(default_factory=dict)
    biases: Mapping[Edge, Array] = field(default_factory=dict)


class Rounder(Protocol):
    """The type of the callables that `register_rounder` takes."""

    def __call__(
        self, proto: ModelLike, plan: Plan, samples: Sequence[Feeds]
    ) -> Iterable[ExternalRounding]:
        """Blocks in the order the model runs. proto: not to be changed."""


_ROUNDERS: dict[str, Rounder] = {}


def register_rounder(name: str, rounder: Rounder | None) -> None:
    """Ask this one too, at effort `high`, in the order of registration; None takes it out."""
    if rounder is None:
        _ROUNDERS.pop(name, None)
    else:
        _ROUNDERS[name] = rounder


def list_rounders() -> Mapping[str, Rounder]:
    """Those to ask."""
    return dict(_ROUNDERS)


def apply_rounding(plan: Plan, block: ExternalRounding) -> tuple[Plan, Lines]:
    """The plan with a block's numbers, and a line for each weight whose integers had to be moved.

    They are moved where they overflow 16-bit sums of the target's kernels, to the nearest that do not.
    Raises PlanError, naming block and site, for numbers that do not fit.
    """
    sites = plan.by_site
    lines = []
    for site in {**block.levels, **block.numbers}:
        old = sites.get(site)
        if old is None or not old.role.is_weight:
            raise PlanError(
                f"{block.block}: {site}",
                "is not a quantized weight of this plan",
                "hand in what it has",
                code="Q408",
            )
        new = _replace_values(old, block)
        assert new.values is not None
        _, sums = count_saturating(new.values, new.sum_orders)
        if sums:
            # The rounder knows why it chose them, so they are what to stay near to, not the float weight.
            new = replace(new, values=limit_sums(new.values, new.values, new.sum_orders))
            lines.append(
                f"{block.block}: {site}: {sums} sums of its integers would overflow 16 bits: moved to the nearest"
            )
        sites[site] = new
    kept = tuple(bias for bias in plan.biases if bias.edge not in block.biases)
    biases = tuple(BiasPlan(edge=edge, values=as_float32(v)) for edge, v in block.biases.items())
    return replace(plan, sites=tuple(sites.values()), biases=(*kept, *biases)), tuple(lines)


def _replace_values(old: SitePlan, block: ExternalRounding) -> SitePlan:
    subject = f"{block.block}: {old.site}"
    qparams = block.numbers.get(old.site, old.qparams)
    levels = block.levels.get(old.site)
    if levels is None or qparams is None or old.qparams is None:
        cause = "comes without levels: those it has belong to other numbers"
        raise PlanError(subject, cause, "hand in both", code="Q408")
    found = np.asarray(levels)
    spec = old.spec
    shaped = old.values is None or found.shape == old.values.shape
    whole = found.dtype.kind in "iu" and (
        not found.size or (found.min() >= spec.qmin and found.max() <= spec.qmax)
    )
    if not shaped or not whole or np.shape(qparams.scale) != np.shape(old.qparams.scale):
        cause = (
            f"its levels must be integers from {spec.qmin} to {spec.qmax}, of the weight's shape"
        )
        fix = "clip them, and keep the shape of its scale"
        raise PlanError(subject, cause, fix, code="Q408")
    return replace(
        old,
        qparams=replace(qparams, origin=f"handed in by {block.block}"),
        values=found.astype(spec.numpy_storage),
    )


# The passes that round weights: sequentially on a few samples, and the searches that effort `high` adds to that.
# A longer search for values of few bits and roundings that others hand in fit the samples they were made with, so the
# validation samples alone judge them.

NAME = "rounding"
SEARCH = "low_bit_search"
EXTERNAL = "external_rounding"
# Where all operators together make it worse: so many segments of the network, each tried on top of those that helped.
_SEGMENTS = 4
# From here on no answer hangs on it, dB, and looking for the segments costs twice what rounding does.
_GOOD_DB = 40.0
_WHY = "rounding to few bits or within 16-bit sums finds its own; `skip: [rounding]` keeps the observer's"


class RoundedWeights(NamedTuple):
    """The note of sequential rounding. before: the plan that it began with. options: what it treated."""

    before: Plan
    options: RoundingOptions


ROUNDED: Note[RoundedWeights] = Note(NAME)


def round_weights(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Round all weights in the order they run, with biases corrected."""
    rounding = _prepare_rounding(ctx, state)()
    if not rounding.done:
        return state, PassReport(NAME, rounding.describe(), outcome=Outcome.NO_GAIN)
    return _report_rounding(state, state.plan, rounding)


def round_segments(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """All weights, their biases left, or segments from the network's end to its start, each kept if it helps."""
    plan = state.plan
    judges = ctx.data.judges
    score = judges.score(state, plan, progress=ctx.progress)
    if ctx.config.effort != "high" and score >= _GOOD_DB:
        return state, report_changes(NAME)
    chosen = NameSet()
    best = None
    operators = list_operators(GraphIndex(ensure_opset(state.model, plan.opset)), plan)
    round_layers = _prepare_rounding(ctx, state)
    # First all with their biases left, whose means count errors that a Relu takes away, too (an ISNet of 16.6 dB: 6.3,
    # and 17.1 with biases left).
    for segment in (chosen, *_cut_segments(operators)):
        # Rounded together from the start: what comes later makes up for what comes before.
        options = RoundingOptions(chosen | segment) if segment else RoundingOptions(biases=False)
        tried = round_layers(options=options)
        now = judges.score(state, tried.plan, progress=ctx.progress)
        if THRESHOLDS[NAME].allows(score, now):
            chosen |= segment
            best = tried
            score = now
            if not segment:
                break
    if best is None:
        return state, report_changes(NAME)
    return _report_rounding(state, plan, best)


def search_longer(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Weights of few bits rounded anew, with a longer search for their values."""
    before, options = ROUNDED.read(state)
    round_layers = _prepare_rounding(ctx, replace(state, plan=before))
    rounding = round_layers(options=replace(options, thorough=True))
    return replace(state, plan=rounding.plan), PassReport(SEARCH, ("values searched longer",))


def round_externally(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The roundings that others hand in, block by block; each is kept if the outputs come nearer to float by it."""
    plan = state.plan
    judge = ctx.data.judge
    lines = []
    samples = take_enough(ctx.data.calibration, plan, ctx.config)
    best = judge.score(state, plan, progress=ctx.progress)
    for name, rounder in list_rounders().items():
        blocks = taken = 0
        before = best
        moved = ""
        # A person's function gets a whole ModelProto, with all of its bytes.
        for block in rounder(attach_weights(state.model), plan, list(samples.samples())):
            blocks += 1
            tried, changes = apply_rounding(plan, block)
            now = judge.score(state, tried, progress=ctx.progress)
            if THRESHOLDS[EXTERNAL].allows(best, now):
                plan = tried
                best = now
                taken += 1
                moved += "".join(f"; {line}" for line in changes)
        lines.append(
            f"{name}: {taken} of {blocks} blocks kept, {before:.1f} to {best:.1f} dB{moved}"
        )
    return replace(state, plan=plan), PassReport(EXTERNAL, ("; ".join(lines),))


def round_again(ctx: SampledContext, state: PlacedState, bare: Plan, name: str) -> PlacedStep:
    """`state`, or `bare`, its plan before weights were rounded, rounded anew: the one that answers better."""
    # With a journal and timers of its own: this pass is one entry of the run's, whatever it took.
    inner = replace(ctx, journal=[], timers=Timers(ctx.progress))
    again = run_stage(ROUNDING, Stage.REFINE, inner, ROUNDED.erase(replace(state, plan=bare)))
    # Rolled back, or with nothing to round: the plan without rounded weights is no rival.
    if again.plan is bare:
        return state, report_changes(name)
    before = score_validation(ctx, state)
    after = score_validation(ctx, again)
    if not THRESHOLDS[name].allows(before, after):
        return state, PassReport(name, outcome=Outcome.WORSE, trial_db=(before, after))
    lines = tuple(line for report in inner.journal for line in report.changed[:1])
    return again, PassReport(name, lines, trial_db=(before, after))


def score_validation(ctx: SampledContext, state: PlacedState) -> float:
    """SQNR in dB of the model that the state's plan gives, on the validation samples."""
    return ctx.data.judge.score(state, state.plan, progress=ctx.progress)


def _prepare_rounding(ctx: SampledContext, state: PlacedState) -> partial[SequentialRounding]:
    """`round_sequentially` of the state's plan, with its samples and other views of them."""
    samples = list(take_enough(ctx.data.calibration, state.plan, ctx.config, state).samples())
    return partial(
        round_sequentially,
        state.model,
        state.plan,
        samples,
        others=augment_samples(samples, state.plan, ctx.skip),
        crew=ctx.crew,
        progress=ctx.progress,
    )


def _report_rounding(state: PlacedState, before: Plan, rounding: SequentialRounding) -> PlacedStep:
    """The state with the rounded plan, and the report of it."""
    plan = rounding.plan
    searched = [
        site for site in plan.sites if site.qparams is not None and site.qparams.origin == SEARCHED
    ]
    replaced = list_replaced(before, plan.with_sites(searched), (Role.WEIGHT,), _WHY)
    lines = [*rounding.describe()]
    if rounding.skipped:
        lines.append(f"not seen in any sample: {', '.join(rounding.skipped)}")
    if replaced:
        lines.append(f"scales of weights {replaced}")
    nodes = frozenset(entry.node for entry in rounding.done)
    note = RoundedWeights(
        before, RoundingOptions(nodes, any(entry.bias for entry in rounding.done))
    )
    return ROUNDED.write(replace(state, plan=plan), note), PassReport(NAME, ("; ".join(lines),))


def _cut_segments(operators: Sequence[Operator]) -> list[NameSet]:
    """Operators of one kind together where there are several kinds, else segments of the network, last first."""
    # One kind may lose by it where another gains, wherever they stand.
    kinds = {operator.kind for operator in operators}
    if len(kinds) > 1:
        return [
            frozenset(op.node.name for op in operators if op.kind == kind) for kind in sorted(kinds)
        ]
    size = -(-len(operators) // _SEGMENTS)
    segments = [operators[k : k + size] for k in range(0, len(operators), size)]
    return [frozenset(operator.node.name for operator in segment) for segment in reversed(segments)]


def _has_few_bits(ctx: SampledContext, state: PlacedState) -> bool:
    rounded = state.plan.with_sites(site for site in state.plan.sites if site.values is not None)
    return _was_rounded(ctx, state) and has_few_bits(rounded)


def _was_rounded(ctx: SampledContext, state: PlacedState) -> bool:
    return ctx.config.effort == "high" and ROUNDED.is_left(state)


ROUNDING: tuple[Pass[SampledContext, PlacedState], ...] = (
    Pass(
        NAME,
        round_weights,
        "rounding weights",
        0.6,
        applies=has_real_samples,
        # On calibration samples too: of a few held back none may be hard.
        trial=Trial(
            lambda ctx, state: ctx.data.judges.score(state, state.plan, progress=ctx.progress),
            THRESHOLDS[NAME],
            lambda ctx, before, after: ctx.data.judges.is_worse(
                after, after.plan, before.plan, progress=ctx.progress
            ),
        ),
        retry=round_segments,
    ),
    Pass(
        SEARCH,
        search_longer,
        "searching longer for values of few bits",
        0.6,
        applies=_has_few_bits,
        # It fits the samples that it was made with.
        trial=Trial(score_validation, THRESHOLDS[SEARCH]),
    ),
    Pass(
        EXTERNAL,
        round_externally,
        "trying external roundings",
        0.6,
        applies=lambda ctx, state: _was_rounded(ctx, state) and bool(list_rounders()),
    ),
)
