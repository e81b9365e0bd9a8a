"""Promotion: the parts that cost the outputs most leave 8 bits, one after another, until the request is met.

Ranking: the noise at the outputs that goes when a candidate is left out of the quantized model, over its cost in time
and bytes. Sites alone, as in an isolated scan, mislead where several spoil a result together; so operators, tensors
with all around them, and stretches are compared. Gains are measured again as the plan changes, the best first (they
only shrink as others are promoted, so one that still leads need not be compared with the rest).

For an SQNR that was asked for, all samples judge the steps, each on ranges that it had no part in, and new ones must
have it all but surely. Then whatever is not needed for it is given back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.backends import find_target
from onnxq.calibrate import calibrate
from onnxq.errors import ConfigError
from onnxq.evaluation.compare import Estimate, ModelErrors
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.metric import Metric
from onnxq.evaluation.toggled import ToggledModel, measure_settings, toggle_model
from onnxq.evaluation.trials import TRIAL_PIECES, TrialModel, measure_models
from onnxq.passes.assembly.model import build_quantized, give_types, write_pairs
from onnxq.passes.base import Pass, RunContext, Stage, Trial
from onnxq.passes.journal import LOST_DB, Outcome, PassReport, Promotion, PromotionStep
from onnxq.passes.judging import make_trial
from onnxq.passes.mixed_precision.attention import has_attention_rules
from onnxq.passes.mixed_precision.candidates import Candidate, Ways, calibrate_missing, list_quantized_ops
from onnxq.passes.mixed_precision.cross_validation import Fold, find_optimism, split_folds, widen_ranges
from onnxq.passes.mixed_precision.request import FLOAT, UINT16, AccuracyRequest, has_whole_bytes
from onnxq.passes.rounding.passes import NAME as ROUNDING
from onnxq.passes.rounding.passes import round_again
from onnxq.passes.state import State
from onnxq.plan import Plan
from onnxq.progress import OutOfTime
from onnxq.sites import Role

NAME, AGAIN = "promotion", "rounding_after_promotion"
# A candidate that takes away less than this share of the best one's noise is not worth an operator.
_WORTH = 0.1
# Without a request: not for more than this share of the operators; a model beyond is no int8 model any more.
_DEFAULT_SHARE = 0.5
# Samples that candidates are ranked on, of which there may be hundreds; steps are judged on the validation samples.
_SCAN_SAMPLES = 8
# A gain measured again that is still this share of the next best one's wins.
_STILL = 0.98
# Further than this from what the file says, and rounding is not the reason.
_APART_DB = 1.0
# Of a candidate, as `Ways.measure_cost` counts: one that gains time, since its pairs cost more, is no bargain for it.
_LEAST_COST = 1e-6
# By how much ranges may reach further than the samples, of which there are so many at most.
_HEADROOM, _FEW_SAMPLES = 1.1, 64
# Noise that is not finite, as a number that can be compared.
_BROKEN = 1e30


Found = tuple[Plan, Promotion]
# Samples that judge, and the float model's outputs on them.
_Judged = tuple[Fold, FloatOutputs]


@dataclass(frozen=True)
class _Step:
    """The promotions so far: keys, the last addition and its gain in dB. found: the errors after it."""

    keys: frozenset[str]
    name: str
    nodes: tuple[str, ...]
    before: float
    after: float
    found: ModelErrors


def promote_operators(ctx: RunContext, state: State) -> tuple[State, PassReport]:
    """The plan with as little promoted as the request takes, by the figures on samples that judge it.

    Without a request: only where the worst output is below 10 dB, where answers are usually broken, and weights and
    activations have 8 bits at least; then until it is above, for at most half of the operators, or not at all.
    Raises ConfigError for uint16 where the target has no such pairs.
    """
    plan, request = state.planned, ctx.request
    rows = (row for row in find_target(plan.target).capabilities if row.role is Role.ACTIVATION)
    if request.to == UINT16 and not any(16 in row.bits and UINT16 in row.storage for row in rows):
        raise ConfigError(
            "promote_to: uint16", f"{plan.target} has no 16-bit activations", "promote to float", code="Q308"
        )
    unchanged = state, PassReport(NAME, outcome=Outcome.NO_GAIN)
    if not request.asked and (not has_whole_bytes(plan) or _is_good(ctx, state)):
        return unchanged
    folds = split_folds(ctx, state) if request.min_sqnr is not None else ()
    search = _Search(ctx, state, request.to, folds)
    if request.metric is not None:
        found, account = _by_metric(search, request, request.metric)
    elif request.min_sqnr is not None:
        found, account = _by_sqnr(search, request.min_sqnr)
    elif search.judged(frozenset()).worst_db() >= LOST_DB:
        return unchanged
    else:
        found, account = _mend_lost(search)
    steps = tuple(f"{step.name}: to {step.to}" for step in account.steps)
    report = PassReport(NAME, steps, outcome=Outcome.KEPT if steps else Outcome.NO_GAIN)
    return replace(state, plan=found, promotion=account), report


def round_promoted(ctx: RunContext, state: State) -> tuple[State, PassReport]:
    """Weights rounded anew for the plan with promotions, where that answers better."""
    sites = tuple(
        replace(site, qparams=None, values=None) if site.role in (Role.WEIGHT, Role.BIAS) else site
        for site in state.planned.sites
    )
    # Numbers as calibration gives them: weights rounded to nearest, biases the model's own.
    bare = replace(state.planned, sites=sites, biases=())
    bare = calibrate(state.model, bare, ctx.data.calibration, crew=ctx.crew, progress=ctx.progress)
    return round_again(ctx, state, bare, AGAIN)


def _estimate_plan(ctx: RunContext, state: State, folds: Sequence[_Judged]) -> Estimate:
    """The SQNR of new samples with the state's plan."""
    errors = ModelErrors()
    with ctx.progress("judging on all samples", sum(len(fold.samples) for fold, _ in folds)) as task:
        for fold, floats in folds:
            trial = make_trial(state, fold.narrow_ranges(state.model, state.planned))
            errors.merge(measure_models([trial], floats, ctx.crew, task)[0])
    return errors.estimate(find_optimism(state))


def _score_promoted(ctx: RunContext, state: State) -> float:
    """The SQNR that new samples have all but surely; where none was asked for, that of the validation samples."""
    if ctx.request.min_sqnr is None or state.promotion is None:
        return ctx.data.judge.score(state, state.planned, progress=ctx.progress)
    threads = ctx.config.verify.threads
    folds = [(fold, FloatOutputs(state.model, fold.samples, threads=threads)) for fold in split_folds(ctx, state)]
    return _estimate_plan(ctx, state, folds).least_db


def _keeps_request(ctx: RunContext, _before: State, _after: State, db: float, changed_db: float) -> bool:
    """True where weights rounded anew do not cost what was asked for, which the few of `round_again` may not show."""
    wanted = math.inf if ctx.request.min_sqnr is None else ctx.request.min_sqnr
    return changed_db >= min(db, wanted)


def _is_good(ctx: RunContext, state: State) -> bool:
    """True when no output is lost, as the file answers; the search looks at it with its own switches."""
    found = ctx.data.judge.measure(state, state.planned, progress=ctx.progress)
    return min((one.sqnr_db for one in found), default=math.inf) >= LOST_DB


def _by_sqnr(search: _Search, wanted: float) -> Found:
    steps: list[_Step] = []
    best = search.estimate(frozenset())
    for step in search.in_time() if best.least_db < wanted else ():
        steps.append(step)
        best = search.estimate(step.keys)
        if best.least_db >= wanted:
            steps = search.prune(steps, wanted)
            break
    note = "" if best.least_db >= wanted else search.end()
    if steps and search.is_float(steps[-1].keys):
        note, steps = _explain_float(search, steps), []
    plan, account = search.outcome(steps, search.ctx.request.describe(), note, wanted)
    return (plan, account) if note else search.add_headroom(plan, account)


def _explain_float(search: _Search, steps: list[_Step]) -> str:
    """Why nothing is promoted where every operator would have to be: steps up to the last one before that."""
    note = "only the float model is sure to hold this"
    partial = [step for step in steps if not search.is_float(step.keys)]
    if not partial:
        return note
    reached, lost = search.estimate(partial[-1].keys), len(search.lost(partial[-1].keys))
    figure = f"{reached.sqnr_db:.1f} ± {reached.spread_db:.1f} dB"
    return f"{note}: with {lost} of {search.count} operators in float the others leave {figure}"


def _mend_lost(search: _Search) -> Found:
    most = max(1, int(_DEFAULT_SHARE * search.count))
    steps: list[_Step] = []
    at = -math.inf
    for step in search.in_time():
        steps.append(step)
        # The figure of a step beyond does not count: so much in float is no int8 model.
        if len(search.lost(step.keys)) > most:
            break
        at = step.found.likely_db()
        if at >= LOST_DB:
            break
    asked = f"no output below {LOST_DB:g} dB (the default)"
    if at < LOST_DB:
        blamed = ", ".join(step.name for step in steps[:3])
        note = f"half of the operators in float would not do; most is lost at {blamed}" if blamed else "nothing helps"
        return search.outcome([], asked, note, LOST_DB)
    return search.outcome(steps, asked, "", LOST_DB)


def _by_metric(search: _Search, request: AccuracyRequest, metric: Metric) -> Found:
    """Steps by SQNR; the metric looked at after 1, 2, 4, … of them, then halfway between the last two."""
    ctx, state = search.ctx, search.state
    optimize, threads = find_target(search.plan.target).times_itself, ctx.config.verify.threads
    least = request.max_drop.least(request.float_value)
    values: dict[int, float] = {}
    steps: list[_Step] = []
    more = search.in_time()

    def value(count: int) -> float:
        if count not in values:
            with ctx.progress(f"running {metric.name} with {count} promoted"):
                model = build_quantized(state, search.finished(steps[count - 1].keys if count else frozenset()))
                values[count] = metric(give_types(state, model), optimize=optimize, threads=threads)
        return values[count]

    # A metric may take minutes, so it is asked as seldom as can be: by doubling, then by halving what lies between.
    low, high, jump = -1, 0, 1
    while value(high) < least and not search.expired():
        low = high
        steps += [step for step, _ in zip(more, range(jump), strict=False)]
        if len(steps) == high:
            break
        high, jump = len(steps), 2 * jump
    met = values[high] >= least
    while met and high - low > 1 and not search.expired():
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) >= least else (middle, high)
    note = "" if met else search.end()
    if high and search.is_float(steps[high - 1].keys):
        met, high, note = False, 0, "only the float model holds this"
    plan, account = search.outcome(steps[:high], request.describe(), note, least)
    return plan, replace(account, unit=request.unit, met=met, value=values[high], float_value=request.float_value)


class _Search:
    """Greedy steps over one toggled model; over finished models, one operator each, where the engine answers otherwise.

    folds: the samples that judge, each fold on the ranges of the others; none: those for validation do.
    as_run: ONNX Runtime's outputs with its optimizations on are worse than the file's own arithmetic, so steps are
    ranked and judged by these. That costs a model for every candidate, where a toggled model costs a run.
    """

    def __init__(self, ctx: RunContext, state: State, to: str, folds: Sequence[Fold] = ()) -> None:
        plan, problem = state.planned, state.problem
        assert problem is not None
        self.ctx, self.state, self.plan = ctx, state, plan
        self.ways = Ways(problem, plan, to, has_attention_rules(ctx, state))
        threads = ctx.config.verify.threads
        self.toggled = self._toggle(plan)
        samples = ctx.data.calibration.take(_SCAN_SAMPLES, ctx.config.data.seed)
        self.scan = FloatOutputs(state.model, samples, threads=threads)
        self.validation = ctx.data.judge.float_outputs(state.model)
        self.folds = [(fold, FloatOutputs(state.model, fold.samples, threads=threads)) for fold in folds]
        self._judged: dict[frozenset[str], ModelErrors] = {}
        self.count = len(list_quantized_ops(problem, plan))
        self.late = False
        self._plans: dict[frozenset[str], Plan] = {}
        self._known: dict[frozenset[str], float] = {}
        self._costs: dict[frozenset[str], float] = {}
        self.as_run = False
        if find_target(plan.target).times_itself:
            written = self._switched([frozenset()], self.validation, "judging")[0]
            run = self._finished([frozenset()], self.validation, "judging")[0]
            self.as_run = run.worst_db() < written.worst_db() - _APART_DB

    def placed(self, keys: frozenset[str]) -> Plan:
        """The plan with these promoted, new sites without numbers."""
        if keys not in self._plans:
            self._plans[keys] = self.ways.place_promoted(keys)
        return self._plans[keys]

    def lost(self, keys: frozenset[str]) -> tuple[str, ...]:
        """Operators that are promoted with these keys."""
        return self.ways.lost(self.placed(keys))

    def finished(self, keys: frozenset[str]) -> Plan:
        """The calibrated plan with these promoted."""
        return calibrate_missing(self.ctx, self.state, self.placed(keys))

    def expired(self) -> bool:
        """True when there is no time for another step."""
        return self.ctx.budget.left() <= 0

    def is_float(self, keys: frozenset[str]) -> bool:
        """True where nothing is left in integers with these promoted: no operator, and no table that is looked up."""
        return self.ways.to == FLOAT and not self.placed(keys).sites

    def judged(self, keys: frozenset[str]) -> ModelErrors:
        """The errors on the samples for judging."""
        if keys not in self._judged:
            self._judged[keys] = self._judge(keys)
        return self._judged[keys]

    def estimate(self, keys: frozenset[str]) -> Estimate:
        """The SQNR of new samples with these promoted."""
        return self.judged(keys).estimate(find_optimism(self.state))

    def _judge(self, keys: frozenset[str]) -> ModelErrors:
        if not self.folds:
            return self._errors([keys], self.validation, "judging")[0]
        whole = ModelErrors()
        for (fold, floats), toggled in zip(self.folds, self._narrowed, strict=True):
            if self.as_run:
                whole.merge(self._finished([keys], floats, "judging", fold)[0])
            else:
                whole.merge(self._switched([keys], floats, "judging", toggled)[0])
        return whole

    @cached_property
    def _narrowed(self) -> list[ToggledModel]:
        """The toggled model of each fold, with its ranges."""
        found = []
        for fold, _ in self.folds:
            plan = fold.narrow_ranges(self.state.model, self.plan)
            same = plan is self.plan or self.as_run
            found.append(self.toggled if same else self._toggle(plan))
        return found

    def _toggle(self, plan: Plan) -> ToggledModel:
        with self.ctx.progress("putting every pair behind a switch"):
            pairs = write_pairs(self.state, plan)
            return toggle_model(self.state.model, pairs, threads=self.ctx.config.verify.threads)

    def prune(self, steps: list[_Step], wanted: float) -> list[_Step]:
        """The steps without the promotions that `wanted`, dB, does not need: the dearest are given back first."""
        keys = steps[-1].keys
        costs = {key: self.cost(keys) - self.cost(keys - {key}) for key in sorted(keys)}
        for key in sorted(costs, key=lambda key: -costs[key]):
            fewer = keys - {key}
            if self.expired():
                break
            if self.estimate(fewer).least_db >= wanted:
                keys = fewer
        if keys == steps[-1].keys:
            return steps
        kept: list[_Step] = []
        for step in steps:
            before = kept[-1].keys if kept else frozenset()
            if step.keys & keys != before:
                kept.append(self._make_step(before, step.keys & keys, step.name))
        return kept

    def add_headroom(self, plan: Plan, account: Promotion) -> Found:
        """Ranges that reach further than few samples did, where the request leaves decibels for that.

        What is clipped on one image of forty no sample of 32 may show: a small ResNet had 35 dB on new images beside
        43 on its samples, and 38 with a tenth more.
        """
        wider = widen_ranges(self.state.model, plan, _HEADROOM)
        if wider is plan or len(self.ctx.data.ranges) > _FEW_SAMPLES or self.expired():
            return plan, account
        if _estimate_plan(self.ctx, replace(self.state, plan=wider), self.folds).least_db < account.least:
            return plan, account
        return wider, replace(account, headroom=_HEADROOM)

    def cost(self, keys: frozenset[str]) -> float:
        """The cost of these promotions; see `Ways.measure_cost`."""
        if keys not in self._costs:
            self._costs[keys] = self.ways.measure_cost(self.placed(keys))
        return self._costs[keys]

    def _make_step(self, keys: frozenset[str], wider: frozenset[str], name: str) -> _Step:
        before, found = self.judged(keys).worst_db(), self.judged(wider)
        return _Step(wider, name, self._more(keys, wider), before, found.worst_db(), found)

    def in_time(self) -> Iterator[_Step]:
        """The steps, as long as there is time."""
        try:
            for step in self.steps():
                yield step
                if self.expired():
                    raise OutOfTime
        except OutOfTime:
            self.late = True

    def end(self) -> str:
        """Why there are no more steps."""
        return "the budget ran out" if self.late or self.expired() else "everything that could be promoted was"

    def steps(self) -> Iterator[_Step]:
        """One promotion after another, the best first, as long as any helps."""
        keys: frozenset[str] = frozenset()
        candidates = self.ways.candidates()
        if self.as_run:
            # Every one is a model to build, where a toggled model has them all.
            candidates = tuple(one for one in candidates if len(one.keys) == 1)
        while True:
            begun = keys
            base = self._noises([keys])[0]
            queue = self._ranked(keys, base, candidates)
            while queue:
                _, _, name, candidate = heapq.heappop(queue)
                wider = keys | candidate.keys
                now = self._noises([wider])[0]
                score = self._score(base - now, keys, wider)
                # Its gain was measured before the steps since: if another may be better now, it waits for its turn.
                if score < 0 and queue and score > _STILL * queue[0][0]:
                    heapq.heappush(queue, (score, len(candidate.keys), name, candidate))
                elif score < 0:
                    yield self._make_step(keys, wider, name)
                    keys, base = wider, now
            if keys == begun:
                return

    def _more(self, keys: frozenset[str], wider: frozenset[str]) -> tuple[str, ...]:
        before = set(self.lost(keys))
        return tuple(name for name in self.lost(wider) if name not in before)

    def _ranked(self, keys: frozenset[str], base: float, candidates: tuple[Candidate, ...]) -> list[_Entry]:
        """Candidates worth looking at, as a heap."""
        fresh = [one for one in candidates if self._more(keys, keys | one.keys)]
        gains = [base - noise for noise in self._noises([keys | one.keys for one in fresh])]
        best = max(gains, default=0.0)
        queue: list[_Entry] = []
        for one, gain in zip(fresh, gains, strict=True):
            if gain > _WORTH * best:
                score = self._score(gain, keys, keys | one.keys)
                heapq.heappush(queue, (score, len(one.keys), one.name, one))
        return queue

    def _score(self, gain: float, keys: frozenset[str], wider: frozenset[str]) -> float:
        """For a heap: the more noise goes for the cost, the lower; 0 where there is no gain."""
        if gain <= 0 or not self._more(keys, wider):
            return 0.0
        return -gain / max(self.cost(wider) - self.cost(keys), _LEAST_COST)

    def _noises(self, settings: list[frozenset[str]]) -> list[float]:
        missing = [keys for keys in dict.fromkeys(settings) if keys not in self._known]
        if missing:
            for keys, errors in zip(missing, self._errors(missing, self.scan, "ranking"), strict=True):
                self._known[keys] = min(errors.noise(), _BROKEN)
        return [self._known[keys] for keys in settings]

    def _errors(self, settings: list[frozenset[str]], floats: FloatOutputs, title: str) -> list[ModelErrors]:
        return (self._finished if self.as_run else self._switched)(settings, floats, title)

    def _finished(
        self, settings: list[frozenset[str]], floats: FloatOutputs, title: str, fold: Fold | None = None
    ) -> list[ModelErrors]:
        """Of finished models, as users run them. fold: on its ranges."""
        threads, ctx = self.ctx.config.verify.threads, self.ctx
        plans = (self.finished(keys) for keys in settings)
        plans = plans if fold is None else (fold.narrow_ranges(self.state.model, plan) for plan in plans)
        models = (TrialModel(build_quantized(self.state, plan), optimize=True, threads=threads) for plan in plans)
        with ctx.progress(title, len(settings) * len(floats.samples)) as task:
            # Each by one worker where there are several to be shared out.
            return measure_models(models, floats, ctx.crew, task, pieces=max(1, TRIAL_PIECES // len(settings)))

    def _switched(
        self, settings: list[frozenset[str]], floats: FloatOutputs, title: str, toggled: ToggledModel | None = None
    ) -> list[ModelErrors]:
        """Errors of the toggled model, which computes as the file says. toggled: another, with a fold's ranges."""
        board = toggled or self.toggled
        chosen = [self.ways.setting(board, self.placed(keys)) for keys in settings]
        return measure_settings(board, floats, chosen, progress=self.ctx.progress, title=title, crew=self.ctx.crew)

    def outcome(self, steps: list[_Step], asked: str, note: str, least: float) -> Found:
        """The plan after these steps, and the account; whether the request is met is for the finished model to say."""
        keys = steps[-1].keys if steps else frozenset()
        lost = self.lost(keys)
        promoted = tuple(
            PromotionStep(name=one.name, to=self.ways.to, nodes=one.nodes, before=one.before, after=one.after)
            for one in steps
        )
        judged = sum(len(fold.samples) for fold, _ in self.folds) or len(self.validation.samples)
        account = Promotion(
            asked=asked, unit="dB", met=False, value=math.nan, least=least, steps=promoted, operators=len(lost),
            left=self.count - len(lost), samples=judged, note=note,
        )  # fmt: skip
        return self.finished(keys), account


_Entry = tuple[float, int, str, Candidate]


def _may_promote(ctx: RunContext, state: State) -> bool:
    """True where a request asks for it; without one only from balanced effort on, and on real samples."""
    asked = ctx.request.asked
    return bool(state.planned.sites) and (asked or (ctx.config.effort != "fast" and not ctx.data.synthetic))


def _was_promoted(ctx: RunContext, state: State) -> bool:
    return state.promotion is not None and bool(state.promotion.steps) and ROUNDING not in ctx.skip


PROMOTION = Pass(
    NAME, Stage.REFINE, promote_operators, "promoting what costs most", 0.8, fast=True, applies=_may_promote
)
ROUNDING_AGAIN = Pass(
    AGAIN, Stage.REFINE, round_promoted, "rounding weights after promotion", 0.6, applies=_was_promoted,
    trial=Trial(score=_score_promoted, keeps=_keeps_request),
)  # fmt: skip
