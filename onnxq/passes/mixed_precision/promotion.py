"""Promotion: parts that cost the outputs most leave 8 bits, as few and as cheap ones as the request takes.

The programme of precisions proposes them (`promotion_search`), by the noise of each alone and by the cost in time and
bytes; finished plans are judged. For an SQNR that was asked for, all samples judge, each on ranges that it had no part
in, and new ones must have it all but surely.
"""

import math
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.errors import ConfigError
from onnxq.evaluation.metric import UINT16, AccuracyRequest, Metric, has_whole_bytes
from onnxq.passes.assembly import build_quantized, run_metric
from onnxq.passes.base import Pass, SampledContext
from onnxq.passes.journal import LOST_DB, Promotion, report_changes
from onnxq.passes.judging import THRESHOLDS, Threshold, Trial
from onnxq.passes.mixed_precision.cross_validation import estimate_new, split_folds, widen_ranges
from onnxq.passes.mixed_precision.promotion_search import PromotionSearch
from onnxq.passes.rounding.passes import NAME as ROUNDING
from onnxq.passes.rounding.passes import round_again, score_validation
from onnxq.passes.state import Note, PlacedState, PlacedStep
from onnxq.plan import Plan
from onnxq.sites import NameSet, Role

NAME = "promotion"
AGAIN = "rounding_after_promotion"
PROMOTED: Note[Promotion] = Note(NAME)
# By how much ranges may reach further than the samples, of which there are so many at most.
_HEADROOM = 1.1
_FEW_SAMPLES = 64
# Without a request no more than one of so many operators: a model beyond is no int8 model any more.
_ONE_OF = 2
_UNASKED = f"no output below {LOST_DB:g} dB (the default)"
_TOO_SLOW = f"to look for operators to blame would take long in a network this slow; `min_sqnr={LOST_DB:g}` does it"

PromotedPlan = tuple[Plan, Promotion]


def promote_operators(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan with as little promoted as the request takes, by the figures on samples that judge it.

    Without a request: only where the worst output is below 10 dB, where answers are usually broken, and weights and
    activations have 8 bits at least; then until it is above, for at most half of the operators, or not at all.
    Raises ConfigError for uint16 where the target has no such pairs.
    """
    plan = state.plan
    request = ctx.request
    wide = any(
        row.role is Role.ACTIVATION and 16 in row.bits and UINT16 in row.storage
        for row in find_target(plan.target).capabilities
    )
    if request.to == UINT16 and not wide:
        raise ConfigError(
            "promote_to: uint16",
            f"{plan.target} has no 16-bit activations",
            "promote to float",
            code="Q308",
        )
    unchanged = state, report_changes(NAME)
    if not request.asked and (not has_whole_bytes(plan) or _is_good(ctx, state)):
        return unchanged
    # A figure that new samples are to have is told by samples without a part in the choice.
    folds = split_folds(ctx, state) if request.min_sqnr is not None else ()
    search = PromotionSearch(ctx, state, request.to, folds)
    if request.metric is not None:
        promoted, account = _meet_metric(search, request, request.metric)
    elif request.min_sqnr is not None:
        promoted, account = _meet_sqnr(search, request.min_sqnr)
    elif search.judge_keys(frozenset()).worst_db() >= LOST_DB:
        return unchanged
    else:
        promoted, account = _mend_lost(search)
    steps = tuple(f"{step.name}: to {step.to}" for step in account.steps)
    report = report_changes(NAME, steps)
    return PROMOTED.write(replace(state, plan=promoted), account), report


def round_promoted(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Weights rounded anew for the plan with promotions, where that answers better."""
    sites = tuple(
        site.without_numbers() if site.role.is_constant else site for site in state.plan.sites
    )
    # Numbers as calibration gives them: weights rounded to nearest, biases the model's own.
    bare = replace(state.plan, sites=sites, biases=())
    bare = ctx.calibrate(state.model, bare, ctx.data.calibration, progress=ctx.progress)
    return round_again(ctx, state, bare, AGAIN)


def _score_promoted(ctx: SampledContext, state: PlacedState) -> float:
    """The SQNR that new samples have all but surely; where none was asked for, that of the validation samples."""
    if ctx.request.min_sqnr is None or not PROMOTED.is_left(state):
        return score_validation(ctx, state)
    return estimate_new(ctx, state)


def _find_threshold(ctx: SampledContext, _before: PlacedState, _after: PlacedState) -> Threshold:
    """Weights rounded anew must not cost what was asked for, which the few samples of `round_again` may not show."""
    wanted = math.inf if ctx.request.min_sqnr is None else ctx.request.min_sqnr
    return replace(THRESHOLDS[AGAIN], enough=wanted)


def _is_good(ctx: SampledContext, state: PlacedState) -> bool:
    """True when no output is lost, as the file answers; the search looks at it with its own switches."""
    figures = ctx.data.judge.list_db(state, state.plan, progress=ctx.progress)
    return min(figures, default=math.inf) >= LOST_DB


def _meet_sqnr(search: PromotionSearch, wanted: float) -> PromotedPlan:
    met = search.meet_figure(lambda keys: search.estimate_keys(keys).least_db, wanted)
    note = "" if met.holds else _explain_unmet(search)
    plan, account = _account_for(search, met.keys, search.ctx.request.describe(), note, wanted)
    return (plan, account) if note else _add_headroom(search, plan, account)


def _explain_unmet(search: PromotionSearch) -> str:
    """Why no promotions hold the request: with all but the one that makes least noise, how far the others are off."""
    if search.is_open_ended():
        return search.explain_end()
    note = "only the float model is sure to hold this"
    partial = search.leave_quietest()
    if not partial:
        return note
    reached = search.estimate_keys(partial)
    lost = len(search.list_promoted(partial))
    figure = f"{reached.sqnr_db:.1f} ± {reached.spread_db:.1f} dB"
    return f"{note}: with {lost} of {search.count} operators in float the others leave {figure}"


def _add_headroom(search: PromotionSearch, plan: Plan, account: Promotion) -> PromotedPlan:
    """Ranges that reach further than few samples did, where the request leaves decibels for that.

    What is clipped on one image of forty no sample of 32 may show: a small ResNet had 35 dB on new images beside
    43 on its samples, and 38 with a tenth more.
    """
    ctx = search.ctx
    state = search.state
    wider = widen_ranges(state.model, plan, _HEADROOM)
    if wider is plan or len(ctx.data.ranges) > _FEW_SAMPLES or search.is_expired():
        return plan, account
    if estimate_new(ctx, replace(state, plan=wider), search.folds) < account.least:
        return plan, account
    return wider, replace(account, headroom=_HEADROOM)


def _mend_lost(search: PromotionSearch) -> PromotedPlan:
    if not search.sample_count:
        return _account_for(search, frozenset(), _UNASKED, _TOO_SLOW, LOST_DB)
    most = max(1, search.count // _ONE_OF)
    met = search.meet_figure(lambda keys: search.judge_keys(keys).likely_db(), LOST_DB)
    # So much in float is no int8 model.
    if met.holds and len(search.list_promoted(met.keys)) <= most:
        return _account_for(search, met.keys, _UNASKED, "", LOST_DB)
    note = _explain_end(search)
    if len(met.figures) > 1:
        parts = search.rank_parts(max(met.figures, key=len))
        blamed = ", ".join([name for part in parts for name in part][:3])
        note = f"half of the operators in float would not do; most is lost at {blamed}"
    return _account_for(search, frozenset(), _UNASKED, note, LOST_DB)


def _meet_metric(search: PromotionSearch, request: AccuracyRequest, metric: Metric) -> PromotedPlan:
    """A metric may take minutes, and is asked as seldom as can be."""
    ctx = search.ctx
    state = search.state
    least = request.max_drop.least(request.float_value)

    def try_keys(keys: NameSet) -> float:
        with ctx.progress(f"running {metric.name} with {len(search.list_promoted(keys))} promoted"):
            # The file itself: the functions of users open it, and it has no switches.
            model = build_quantized(state, search.finish_plan(keys))
            return run_metric(metric, ctx.config, state, model)

    met = search.meet_figure(try_keys, least, smooth=False)
    note = "" if met.holds else _explain_end(search)
    plan, account = _account_for(search, met.keys, request.describe(), note, least)
    value = met.figures[met.keys]
    return plan, replace(
        account, unit=request.unit, met=met.holds, value=value, float_value=request.float_value
    )


def _explain_end(search: PromotionSearch) -> str:
    """Why no promotions hold the request."""
    return search.explain_end() if search.is_open_ended() else "only the float model holds this"


def _account_for(
    search: PromotionSearch, keys: NameSet, asked: str, note: str, least: float
) -> PromotedPlan:
    """The plan with these promotions, and the account; whether the request is met is for the finished model to say."""
    lost = len(search.list_promoted(keys))
    account = Promotion(
        asked=asked,
        unit="dB",
        met=False,
        value=math.nan,
        least=least,
        steps=search.list_steps(keys),
        operators=lost,
        left=search.count - lost,
        samples=sum(len(judge.floats.samples) for judge in search.judges),
        note=note,
    )
    return search.finish_plan(keys), account


def _may_promote(ctx: SampledContext, state: PlacedState) -> bool:
    """True where a request asks for it; without one only from balanced effort on, on real samples, where float pays."""
    unasked = (
        ctx.config.effort != "fast"
        and not ctx.data.synthetic
        and not find_target(state.plan.target).whole
    )
    return bool(state.plan.sites) and (ctx.request.asked or unasked)


def _was_promoted(ctx: SampledContext, state: PlacedState) -> bool:
    account = PROMOTED.find(state)
    return account is not None and bool(account.steps) and ROUNDING not in ctx.skip


PROMOTION = Pass(
    NAME,
    promote_operators,
    "promoting what costs most",
    0.8,
    fast=True,
    applies=_may_promote,
)
ROUNDING_AGAIN = Pass(
    AGAIN,
    round_promoted,
    "rounding weights after promotion",
    0.6,
    applies=_was_promoted,
    trial=Trial(score=_score_promoted, threshold=_find_threshold),
)
