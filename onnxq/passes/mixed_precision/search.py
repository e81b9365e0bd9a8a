"""The search that all choices between float, more bits and other scales share: predict, try, keep what pays.

A pass lists candidates, and predicts by switched pairs what each gains and by the planner what it costs. `LIMITS` says
which are worth a trial; `take_paying` keeps those that pay together, and `PromotionSearch` those that gain most for
their cost, one after another. The plan that comes of it is judged by the runner (`judging.THRESHOLDS`), or, where
somebody asked for an accuracy, by that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from onnxq.backends import find_target
from onnxq.evaluation.compare import Estimate, FloatOutputs, ModelErrors
from onnxq.evaluation.metric import FLOAT
from onnxq.evaluation.toggled import Setting, Switch, measure_settings, toggle_model
from onnxq.evaluation.trials import TRIAL_PIECES, TrialModel, measure_models
from onnxq.passes.assembly import build_quantized, write_pairs
from onnxq.passes.base import SampledContext
from onnxq.passes.judging import LIMITS
from onnxq.passes.mixed_precision.candidates import PromotionCandidate, Ways, calibrate_missing, list_quantized_ops
from onnxq.passes.mixed_precision.cross_validation import Fold, find_optimism
from onnxq.passes.mixed_precision.float_parts import has_attention_rules
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan
from onnxq.progress import OutOfTime
from onnxq.sites import Names, Role

# A gain measured again that is still this share of the next best one's wins.
_STILL = 0.98
# Further than this from what the file says, and rounding is not the reason.
_APART_DB = 1.0
# Of a candidate, as `Ways.measure_cost` counts: one that gains time, since its pairs cost more, is no bargain for it.
_LEAST_COST = 1e-6
# Noise that is not finite, as a number that can be compared.
_BROKEN = 1e30


def take_paying(
    start: frozenset[str],
    candidates: Iterable[frozenset[str]],
    pays: Callable[[frozenset[str]], bool],
    change: Callable[[frozenset[str], frozenset[str]], frozenset[str]] = frozenset.union,
) -> frozenset[str]:
    """The keys after each candidate in order has been taken, by `change`, where the result pays."""
    for candidate in candidates:
        changed = change(start, candidate)
        if pays(changed):
            start = changed
    return start


class SwitchedPlan:
    """A calibrated plan whose pairs and rounded constants can be switched off, to see what each costs the outputs."""

    def __init__(self, ctx: SampledContext, state: PlacedState, plan: Plan) -> None:
        self._ctx, self._model = ctx, state.model
        with ctx.progress("putting every pair behind a switch"):
            pairs = write_pairs(state, plan)
            self.toggled = toggle_model(state.model, pairs, threads=ctx.config.verify.threads)

    def list_pairs(self, *roles: Role) -> list[Switch]:
        """The switches of these roles, in the order the model runs."""
        return [switch for switch in self.toggled.switches if switch.role in roles]

    def measure_settings(self, settings: Sequence[Setting], floats: FloatOutputs, title: str) -> list[ModelErrors]:
        """The errors with these switches on and all others off, by setting."""
        ctx = self._ctx
        return measure_settings(self.toggled, floats, settings, progress=ctx.progress, title=title, crew=ctx.crew)

    def measure_alone(self, title: str) -> dict[str, float]:
        """Noise at the outputs of each pair of an activation alone, by the nodes that read it."""
        pairs = self.list_pairs(Role.ACTIVATION)
        floats = self._ctx.data.judge.float_outputs(self._model)
        errors = self.measure_settings([frozenset([pair]) for pair in pairs], floats, title)
        return {name: error.noise() for pair, error in zip(pairs, errors, strict=True) for name in pair.readers}


@dataclass(frozen=True)
class SearchStep:
    """The promotions so far: keys, the last addition, dB before and after it, the errors after it."""

    keys: frozenset[str]
    name: str
    nodes: Names
    before: float
    after: float
    errors: ModelErrors


@dataclass(frozen=True, eq=False)
class _ScoredSamples:
    """Samples that promotions are measured on. switched: the plan on them. fold: they are one, with its own ranges."""

    floats: FloatOutputs
    switched: SwitchedPlan
    fold: Fold | None = None


# Those that leave nothing in integers come last, then by score, size and name.
_QueueEntry = tuple[bool, float, int, str, PromotionCandidate]


class PromotionSearch:
    """Greedy steps over one toggled model; over finished models, one operator each, where the engine answers otherwise.

    folds: the samples that judge, each fold on the ranges of the others; none: those for validation do.
    as_run: ONNX Runtime's outputs with its optimizations on are worse than the file's own arithmetic, so steps are
    ranked and judged by these. That costs a model for every candidate, where a toggled model costs a run.
    """

    def __init__(self, ctx: SampledContext, state: PlacedState, to: str, folds: Sequence[Fold] = ()) -> None:
        plan, threads = state.planned, ctx.config.verify.threads
        self.ctx, self.state, self.folds = ctx, state, folds
        self.ways = Ways(state.problem, plan, to, has_attention_rules(ctx, state))
        self.count = len(list_quantized_ops(state.problem, plan))
        self.late = False
        self._switched = SwitchedPlan(ctx, state, plan)
        scanned = ctx.data.calibration.take(LIMITS["promotion"].samples, ctx.config.data.seed)
        self._scanned = _ScoredSamples(FloatOutputs(state.model, scanned, threads=threads), self._switched)
        self._validation = _ScoredSamples(ctx.data.judge.float_outputs(state.model), self._switched)
        self._plans: dict[frozenset[str], Plan] = {}
        self._noises: dict[frozenset[str], float] = {}
        self._costs: dict[frozenset[str], float] = {}
        self._errors: dict[frozenset[str], ModelErrors] = {}
        self.as_run = False
        if find_target(plan.target).times_itself:
            (written,) = self._measure_keys([frozenset()], self._validation, "judging")
            self.as_run = True
            (run,) = self._measure_keys([frozenset()], self._validation, "judging")
            self.as_run = run.worst_db() < written.worst_db() - _APART_DB

    @cached_property
    def judges(self) -> list[_ScoredSamples]:
        """The samples that judge, each with the plan on its ranges."""
        judges = []
        for fold in self.folds:
            plan = fold.narrow_ranges(self.state.model, self.ways.plan)
            same = plan is self.ways.plan or self.as_run
            switched = self._switched if same else SwitchedPlan(self.ctx, self.state, plan)
            floats = FloatOutputs(self.state.model, fold.samples, threads=self.ctx.config.verify.threads)
            judges.append(_ScoredSamples(floats, switched, fold))
        return judges or [self._validation]

    def place_keys(self, keys: frozenset[str]) -> Plan:
        """The plan with these promoted, new sites without qparams."""
        if keys not in self._plans:
            self._plans[keys] = self.ways.promote_steadily(keys)
        return self._plans[keys]

    def finish_plan(self, keys: frozenset[str]) -> Plan:
        """The calibrated plan with these promoted."""
        return calibrate_missing(self.ctx, self.state, self.place_keys(keys))

    def list_promoted(self, keys: frozenset[str]) -> Names:
        """Operators that are promoted with these keys."""
        return self.ways.list_promoted(self.place_keys(keys))

    def is_expired(self) -> bool:
        """True when there is no time for another step."""
        return self.ctx.budget.left() <= 0

    def is_float(self, keys: frozenset[str]) -> bool:
        """True where nothing is left in integers with these promoted: no operator, and no table that is looked up."""
        return self.ways.to == FLOAT and not self.place_keys(keys).sites

    def judge_keys(self, keys: frozenset[str]) -> ModelErrors:
        """The errors on the samples for judging."""
        if keys not in self._errors:
            errors = self._errors[keys] = ModelErrors()
            for samples in self.judges:
                errors.merge(self._measure_keys([keys], samples, "judging")[0])
        return self._errors[keys]

    def estimate_keys(self, keys: frozenset[str]) -> Estimate:
        """The SQNR of new samples with these promoted."""
        return self.judge_keys(keys).estimate(find_optimism(self.state))

    def prune_steps(self, steps: list[SearchStep], wanted: float) -> list[SearchStep]:
        """The steps without the promotions that `wanted`, dB, does not need: the dearest are given back first."""
        every = steps[-1].keys
        costs = {key: self._find_cost(every) - self._find_cost(every - {key}) for key in sorted(every)}
        dearest_first = sorted(costs, key=lambda key: -costs[key])
        in_time = takewhile(lambda _: not self.is_expired(), dearest_first)
        keys = take_paying(
            every,
            (frozenset([key]) for key in in_time),
            lambda fewer: self.estimate_keys(fewer).least_db >= wanted,
            frozenset.difference,
        )
        if keys == every:
            return steps
        needed: list[SearchStep] = []
        for step in steps:
            before = needed[-1].keys if needed else frozenset()
            if step.keys & keys != before:
                needed.append(self._make_step(before, step.keys & keys, step.name))
        return needed

    def take_steps(self) -> Iterator[SearchStep]:
        """The steps, as long as there is time."""
        try:
            for step in self.find_steps():
                yield step
                if self.is_expired():
                    raise OutOfTime
        except OutOfTime:
            self.late = True

    def explain_end(self) -> str:
        """Why there are no more steps."""
        return "the budget ran out" if self.late or self.is_expired() else "everything that could be promoted was"

    def find_steps(self) -> Iterator[SearchStep]:
        """One promotion after another, the best first, as long as any helps; all in float only where no other does."""
        keys: frozenset[str] = frozenset()
        candidates = self.ways.list_candidates()
        if self.as_run:
            # Every one is a model to build, where a toggled model has them all.
            candidates = tuple(candidate for candidate in candidates if len(candidate.keys) == 1)
        while True:
            begun = keys
            base = self._measure_noises([keys])[0]
            queue = self._rank_candidates(keys, base, candidates)
            while queue:
                candidate = heapq.heappop(queue)[-1]
                wider = keys | candidate.keys
                if self.is_float(wider) and keys != begun:
                    continue
                noise = self._measure_noises([wider])[0]
                entry = self._make_entry(candidate, base - noise, keys)
                score = entry[1]
                # Its gain was measured before the steps since: if another may be better now, it waits for its turn.
                if score < 0 and queue and entry[:2] > (queue[0][0], _STILL * queue[0][1]):
                    heapq.heappush(queue, entry)
                elif score < 0:
                    yield self._make_step(keys, wider, candidate.name)
                    keys, base = wider, noise
            if keys == begun:
                return

    def _make_step(self, keys: frozenset[str], wider: frozenset[str], name: str) -> SearchStep:
        before, errors = self.judge_keys(keys).worst_db(), self.judge_keys(wider)
        return SearchStep(wider, name, self._list_more(keys, wider), before, errors.worst_db(), errors)

    def _list_more(self, keys: frozenset[str], wider: frozenset[str]) -> tuple[str, ...]:
        """Operators that are promoted with the wider keys only."""
        before = set(self.list_promoted(keys))
        return tuple(name for name in self.list_promoted(wider) if name not in before)

    def _rank_candidates(
        self, keys: frozenset[str], base: float, candidates: tuple[PromotionCandidate, ...]
    ) -> list[_QueueEntry]:
        """Candidates worth looking at, as a heap."""
        fresh = [candidate for candidate in candidates if self._list_more(keys, keys | candidate.keys)]
        gains = [base - noise for noise in self._measure_noises([keys | candidate.keys for candidate in fresh])]
        entries = [self._make_entry(candidate, gain, keys) for candidate, gain in zip(fresh, gains, strict=True)]
        partial = [gain for entry, gain in zip(entries, gains, strict=True) if not entry[0]]
        least = LIMITS["promotion"].least_gain * max(partial, default=0.0)
        queue = [entry for entry, gain in zip(entries, gains, strict=True) if gain > least]
        heapq.heapify(queue)
        return queue

    def _make_entry(self, candidate: PromotionCandidate, gain: float, keys: frozenset[str]) -> _QueueEntry:
        wider = keys | candidate.keys
        score = self._score_gain(gain, keys, wider)
        return self.is_float(wider), score, len(candidate.keys), candidate.name, candidate

    def _score_gain(self, gain: float, keys: frozenset[str], wider: frozenset[str]) -> float:
        """For a heap: the more noise goes for the cost, the lower; 0 where there is no gain."""
        if gain <= 0 or not self._list_more(keys, wider):
            return 0.0
        return -gain / max(self._find_cost(wider) - self._find_cost(keys), _LEAST_COST)

    def _find_cost(self, keys: frozenset[str]) -> float:
        """The cost of these promotions; see `Ways.measure_cost`."""
        if keys not in self._costs:
            self._costs[keys] = self.ways.measure_cost(self.place_keys(keys))
        return self._costs[keys]

    def _measure_noises(self, settings: list[frozenset[str]]) -> list[float]:
        missing = [keys for keys in dict.fromkeys(settings) if keys not in self._noises]
        if missing:
            for keys, errors in zip(missing, self._measure_keys(missing, self._scanned, "ranking"), strict=True):
                self._noises[keys] = min(errors.noise(), _BROKEN)
        return [self._noises[keys] for keys in settings]

    def _measure_keys(self, settings: list[frozenset[str]], samples: _ScoredSamples, title: str) -> list[ModelErrors]:
        """Errors with these promoted: of switched pairs, as the file says, or of finished models, as users run them."""
        if not self.as_run:
            toggled = samples.switched.toggled
            chosen = [self.ways.choose_switches(toggled, self.place_keys(keys)) for keys in settings]
            return samples.switched.measure_settings(chosen, samples.floats, title)
        models = (self._finish_trial(keys, samples.fold) for keys in settings)
        with self.ctx.progress(title, len(settings) * len(samples.floats.samples)) as task:
            # Each by one worker where there are several to be shared out.
            pieces = max(1, TRIAL_PIECES // len(settings))
            return measure_models(models, samples.floats, self.ctx.crew, task, pieces=pieces)

    def _finish_trial(self, keys: frozenset[str], fold: Fold | None) -> TrialModel:
        plan = self.finish_plan(keys)
        if fold is not None:
            plan = fold.narrow_ranges(self.state.model, plan)
        return TrialModel(build_quantized(self.state, plan), optimize=True, threads=self.ctx.config.verify.threads)
