"""Operators that leave integers for a request: the cheapest promotions at a noise, by the programme of precisions.

Each weight and each tensor is rounded alone, and the programme adds that noise up. How far that is from what all of
them make together a curve through the plans that were judged tells, and a next plan is proposed, until the cheapest
that holds was judged. Operators go to float; for uint16 it is tensors that get more bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile

import numpy as np

from onnxq.backends import find_target
from onnxq.evaluation.accumulator import db_to_noise
from onnxq.evaluation.compare import Estimate, FloatOutputs, ModelErrors
from onnxq.evaluation.metric import FLOAT
from onnxq.evaluation.trials import TRIAL_PIECES, TrialModel, measure_models
from onnxq.passes.assembly import build_quantized
from onnxq.passes.base import SampledContext
from onnxq.passes.journal import PromotionStep
from onnxq.passes.mixed_precision import candidates, precisions
from onnxq.passes.mixed_precision.candidates import Keys, SwitchedPlan, take_paying
from onnxq.passes.mixed_precision.cross_validation import Fold, answer_samples, find_optimism
from onnxq.passes.mixed_precision.float_parts import has_attention_rules
from onnxq.passes.mixed_precision.program import Condition, Costs, Implication, PrecisionProgram
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan
from onnxq.planner.cut import CutProblem
from onnxq.progress import OutOfTime
from onnxq.sites import Names

# Further than this from what the file says, and rounding is not the reason.
_APART_DB = 1.0
# Plans that are judged for a request, and steps that their account has, at most.
_ROUNDS = 8
_STEPS = 8
# The noise of each part, of which there are hundreds, is measured on so many samples, which take so long by prediction.
_SAMPLES = 8
_MOST_MICROSECONDS = 6e8
# For each value of each tensor: what no engine has in integers, such as InstanceNorm, and pairs that round.
_VALUE_MICROSECONDS = 1e-3
_KEPT = "integers"
# Noise of nothing, where logarithms are taken. Proposals up to what failed.
_LEAST_NOISE = 1e-12
_BETWEEN = 6


@dataclass(frozen=True, eq=False)
class _ScoredSamples:
    """Samples that promotions are measured on. switched: the plan on them. fold: they are one, with its own ranges."""

    floats: FloatOutputs
    switched: SwitchedPlan
    fold: Fold | None = None


@dataclass(frozen=True)
class Meeting:
    """Promotions for a request, whether they hold it, and the figures of all that were judged."""

    keys: Keys
    holds: bool
    figures: Mapping[Keys, float]


class PromotionSearch:
    """Plans with promotions, judged by one toggled model; by finished models where the engine answers otherwise.

    folds: the samples that judge, each fold on the ranges of the others; none: those for validation do.
    as_run: ONNX Runtime's outputs with its optimizations on are worse than the file's own arithmetic, so plans are
    judged by these. That costs a model each, where a toggled model costs a run.
    """

    def __init__(
        self, ctx: SampledContext, state: PlacedState, to: str, folds: Sequence[Fold] = ()
    ) -> None:
        plan = state.plan
        self.ctx = ctx
        self.state = state
        self.folds = folds
        self.ways = candidates.Ways(state.problem, plan, to, has_attention_rules(ctx, state))
        self.count = len(candidates.list_quantized_ops(state.problem, plan))
        self.late = False
        self._switched = SwitchedPlan(ctx, state, plan)
        self._validation = _ScoredSamples(ctx.data.judge.float_outputs(state.model), self._switched)
        self._plans: dict[Keys, Plan] = {}
        self._errors: dict[Keys, ModelErrors] = {}
        # As the programme adds it up, by promotions that it proposed.
        self._noises: dict[Keys, float] = {}
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
            judges.append(_ScoredSamples(fold.floats, switched, fold))
        return judges or [self._validation]

    def place_keys(self, keys: Keys) -> Plan:
        """The plan with these promoted, new sites without qparams."""
        if keys not in self._plans:
            self._plans[keys] = self.ways.promote_steadily(keys)
        return self._plans[keys]

    def finish_plan(self, keys: Keys) -> Plan:
        """The calibrated plan with these promoted."""
        return candidates.calibrate_missing(self.ctx, self.state, self.place_keys(keys))

    def list_promoted(self, keys: Keys) -> Names:
        """Operators that are promoted with these keys."""
        return self.ways.list_promoted(self.place_keys(keys))

    def is_expired(self) -> bool:
        """True when there is no time for another step."""
        return self.ctx.budget.left() <= 0

    def is_float(self, keys: Keys) -> bool:
        """True where nothing is left in integers with these promoted: no operator, and no table that is looked up."""
        return self.ways.to == FLOAT and not self.place_keys(keys).sites

    def judge_keys(self, keys: Keys) -> ModelErrors:
        """The errors on the samples for judging."""
        if keys not in self._errors:
            errors = self._errors[keys] = ModelErrors()
            for samples in self.judges:
                errors.merge(self._measure_keys([keys], samples, "judging")[0])
        return self._errors[keys]

    def estimate_keys(self, keys: Keys) -> Estimate:
        """The SQNR of new samples with these promoted."""
        return self.judge_keys(keys).estimate(find_optimism(self.state))

    @cached_property
    def sample_count(self) -> int:
        """The number of samples to measure the noise of each part on, fewer where the network is slow: maybe 0."""
        cut = CutProblem(self.state.problem.ops)
        costs = map(cut.compute_costs, self.state.problem.costs.values())
        run = max((cut.time_us(kind, frozenset()) for kind in costs), default=0.0)
        run += _VALUE_MICROSECONDS * sum(map(math.prod, self.state.problem.ops.shapes.values()))
        # Of each operator the weight and about one tensor.
        whole = max(2 * self.count * run, 1.0)
        return int(min(_SAMPLES, _MOST_MICROSECONDS / whole))

    @cached_property
    def program(self) -> PrecisionProgram:
        """Promotions as a programme, whose time is their cost: shares of time, bytes of weights and operators."""
        ctx = self.ctx
        state = self.state
        # A request gets its answer, however long it takes.
        answers = answer_samples(ctx, state, ctx.take_samples(max(self.sample_count, 1)))
        names = candidates.list_quantized_ops(state.problem, self.ways.plan)
        own = precisions.Precision(_KEPT)
        if self.as_run:
            # Rounding alone does not show what the engine computes otherwise: what goes with each does.
            settings = [Keys(), *self._groups.values()]
            errors = self._measure_keys(
                settings, _ScoredSamples(answers, self._switched), f"measuring {_KEPT}"
            )
            every, *without = (error.noise() for error in errors)
            groups = {
                # Below 0 where its errors cancel others.
                name: max(every - noise, 0.0)
                for name, noise in zip(self._groups, without, strict=True)
            }
            measured = precisions.MeasuredPrecision(
                own, frozenset(names), state, weights=groups, tensors={}
            )
        else:
            measured = precisions.measure_precision(self._switched, state, answers, own, names)
            tensors = measured.tensors
            groups = {
                name: sum(tensors.get(key, 0.0) for key in keys)
                for name, keys in self._groups.items()
            }
        if self.ways.to != FLOAT:
            one = Costs(time=1.0)
            return PrecisionProgram(
                {name: {self.ways.to: one, _KEPT: Costs(n)} for name, n in groups.items()}
            )
        program = _weigh_costs(
            precisions.ProgramBuilder([measured], cpu=ctx.config.cpu).build_program(), len(names)
        )
        # The float model is there already: behind all others in float the last is not.
        floats = tuple(Condition(name, frozenset([FLOAT])) for name in names[:-1])
        ties = (Implication(floats, Condition(name, frozenset([_KEPT]))) for name in names[-1:])
        return replace(program, ties=(*program.ties, *ties))

    @cached_property
    def _groups(self) -> Mapping[str, Keys]:
        """The keys that are promoted together, by the name that the programme has for them."""
        return self.ways.list_groups()

    def meet_figure(
        self, judge: Callable[[Keys], float], wanted: float, *, smooth: bool = True
    ) -> Meeting:
        """Promotions with which `judge` is at least `wanted`, the cheapest that were judged.

        Where none are and time is out, or tensors have 16 bits at most, the best; else none, as only float is left.
        smooth: the figure is in dB. Another one has no unit, and tells only whether it holds.
        """
        figures = {Keys(): judge(frozenset())}
        try:
            for _ in range(_ROUNDS):
                if figures[frozenset()] >= wanted:
                    break
                if self.is_expired():
                    raise OutOfTime
                keys = self._propose_keys(figures, wanted, smooth=smooth)
                if keys is None:
                    break
                figures[keys] = judge(keys)
        except OutOfTime:
            self.late = True
        holding = [keys for keys, figure in figures.items() if figure >= wanted]
        if not holding:
            best = max(figures, key=figures.__getitem__)
            return Meeting(best if self.is_open_ended() else frozenset(), False, figures)
        cheapest = min(holding, key=lambda keys: self.ways.measure_cost(self.place_keys(keys)))
        if not smooth:
            return Meeting(cheapest, True, figures)
        # Some are faster in float, and were not needed.
        quiet = [self._join_groups(part) for part in reversed(self.rank_parts(cheapest))][:_ROUNDS]
        in_time = takewhile(lambda _: not self.is_expired(), quiet)
        needed = take_paying(
            cheapest, in_time, lambda keys: judge(keys) >= wanted, frozenset.difference
        )
        return Meeting(needed, True, figures)

    def _propose_keys(
        self, figures: Mapping[Keys, float], wanted: float, *, smooth: bool
    ) -> Keys | None:
        """The next to judge; None where all there is to know is known, or only float is left."""
        kept = dict.fromkeys(self.program.operators, _KEPT)
        self._noises[frozenset()] = self.program.add_costs(kept).noise
        known = {keys: (self._noises[keys], figure) for keys, figure in figures.items()}
        # That of all in integers at least.
        failing = [noise for noise, figure in known.values() if figure < wanted]
        if smooth:
            curve = Rescaling.fit_pairs(
                (noise, db_to_noise(figure)) for noise, figure in known.values()
            )
            limit = curve.find_prediction(db_to_noise(wanted))
        else:
            limit = bisect_noise(
                failing, [noise for noise, figure in known.values() if figure >= wanted]
            )
        # Where that is the float model, or known, something between may do.
        low = max(limit, _LEAST_NOISE)
        high = max(min(failing), _LEAST_NOISE)
        for noise in np.geomspace(low, high, _BETWEEN, endpoint=False).tolist():
            # All where none leave so little noise, as the programme adds it up.
            chosen = self.program.solve("time", {"noise": noise}) or dict.fromkeys(
                self.program.operators, self.ways.to
            )
            keys = self._join_groups(name for name in self._groups if chosen[name] == self.ways.to)
            if self.ways.to == FLOAT:
                # Others may not pay beside them, and choices that differ by these are one.
                keys |= frozenset(self.list_promoted(keys))
            self._noises.setdefault(keys, self.program.add_costs(chosen).noise)
            if keys not in figures and not self.is_float(keys):
                return keys
        return None

    def list_steps(self, keys: Keys) -> tuple[PromotionStep, ...]:
        """These promotions one after another, those that make most noise first, with the dB before and after each."""
        parts = self.rank_parts(keys) if keys else []
        size = max(1, -(-len(parts) // _STEPS))
        steps = []
        before = Keys()
        for k in range(0, len(parts), size):
            names = [name for part in parts[k : k + size] for name in part]
            wider = before | self._join_groups(names)
            known = set(self.list_promoted(before))
            more = tuple(name for name in self.list_promoted(wider) if name not in known)
            if more:
                name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
                start, end = (self.judge_keys(promoted).worst_db() for promoted in (before, wider))
                steps.append(
                    PromotionStep(name=name, to=self.ways.to, nodes=more, before=start, after=end)
                )
                before = wider
        return tuple(steps)

    def leave_quietest(self) -> Keys:
        """All but what makes least noise, with which something is left in integers."""
        # The quietest stand last and are taken out first.
        parts = self.rank_parts(frozenset().union(*self._groups.values()))
        names = [name for part in parts for name in part]
        while names and self.is_float(self._join_groups(names)):
            names.pop()
        return self._join_groups(names)

    def _join_groups(self, names: Iterable[str]) -> Keys:
        return frozenset().union(*(self._groups[name] for name in names))

    def rank_parts(self, keys: Keys) -> list[list[str]]:
        """The names of what is promoted with these keys, the noisiest first: all around a tensor together."""
        left = {name for name, group in self._groups.items() if group <= keys}
        # In the order of the network, which breaks ties.
        noises: list[tuple[Names, float]] = [
            ((name,), options[_KEPT].noise) for name, options in self.program.operators.items()
        ]
        for shared in self.program.shared:
            around = tuple(one.operator for one in shared.any_of if one.operator in self._groups)
            # As long as one of them computes in integers, the tensor is rounded.
            if shared.costs.noise and left.issuperset(around):
                noises.append((around, shared.costs.noise))
        parts = []
        for names, _ in sorted(noises, key=lambda entry: -entry[1]):
            part = [name for name in names if name in left]
            left.difference_update(part)
            if part:
                parts.append(part)
        return parts

    def is_open_ended(self) -> bool:
        """True where something is left that was not tried, for want of time, or for want of more bits than 16."""
        return self.late or self.ways.to != FLOAT

    def explain_end(self) -> str:
        """Why there are no more steps."""
        return (
            "the budget ran out"
            if self.late or self.is_expired()
            else "everything that could be promoted was"
        )

    def _measure_keys(
        self, settings: list[Keys], samples: _ScoredSamples, title: str
    ) -> list[ModelErrors]:
        """Errors with these promoted: of switched pairs, as the file says, or of finished models, as users run them."""
        if not self.as_run:
            chosen = [
                self.ways.choose_switches(samples.switched.toggled, self.place_keys(keys))
                for keys in settings
            ]
            return samples.switched.measure_settings(chosen, samples.floats, title)
        plans = map(self.finish_plan, settings)
        if samples.fold is not None:
            plans = map(partial(samples.fold.narrow_ranges, self.state.model), plans)
        models = (TrialModel(build_quantized(self.state, plan), fuse_pairs=True) for plan in plans)
        with self.ctx.progress(title, len(settings) * len(samples.floats.samples)) as task:
            # Each by one worker where there are several to be shared out.
            pieces = max(1, TRIAL_PIECES // len(settings))
            return measure_models(models, samples.floats, self.ctx.crew, task, pieces=pieces)


def _weigh_costs(program: PrecisionProgram, count: int) -> PrecisionProgram:
    """The programme with one cost, in `time`: of `count` operators, all time in float, and all bytes of weights."""
    integers, floats = (
        program.add_costs(dict.fromkeys(program.operators, one)) for one in (_KEPT, FLOAT)
    )
    time = floats.time or 1.0
    size = floats.size - integers.size or 1.0

    def weigh(costs: Costs) -> Costs:
        return Costs(costs.noise, 0.0, costs.time / time + costs.size / size)

    each = candidates.LEAST_COST / max(count, 1)
    operators = {}
    for name, options in program.operators.items():
        kept = weigh(options[_KEPT])
        left = weigh(options[FLOAT])
        # One that gains time in float is no bargain for it.
        operators[name] = {_KEPT: kept, FLOAT: left._replace(time=max(left.time, kept.time) + each)}
    shared = [replace(share, costs=weigh(share.costs)) for share in program.shared]
    return replace(program, operators=operators, shared=shared)


# A rising curve through predictions and measurements of some models, which tells of others.
# Of a curve where measurements do not rise: that it can be read either way.
_SLOPE = 1e-6


@dataclass(frozen=True, eq=False)
class Rescaling:
    """A rising curve from what was predicted to what was measured, through logarithms of both, at these points."""

    predicted: Sequence[float] = (0.0,)
    measured: Sequence[float] = (0.0,)

    @classmethod
    def fit_pairs(cls, pairs: Iterable[tuple[float, float]]) -> Rescaling:
        """The rising curve nearest to pairs of predicted and measured (pool adjacent violators, Barlow et al. 1972)."""
        finite = ((a, b) for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf)
        logs = sorted((math.log(a), math.log(b)) for a, b in finite)
        # Leftmost and rightmost prediction, mean of the measurements, and their number.
        blocks = []
        for at, value in logs:
            blocks.append((at, at, value, 1))
            while len(blocks) > 1 and (
                blocks[-2][2] >= blocks[-1][2] or blocks[-2][1] >= blocks[-1][0]
            ):
                (left, _, low, n), (_, right, high, m) = blocks[-2:]
                blocks[-2:] = [(left, right, (low * n + high * m) / (n + m), n + m)]
        ends = [
            (at, value + slope)
            for left, right, value, _ in blocks
            for at, slope in {left: 0.0, right: _SLOPE * (right - left)}.items()
        ]
        return cls(*zip(*ends, strict=True)) if ends else cls()

    def expect_measurement(self, value: float) -> float:
        """The measurement to expect at a prediction."""
        return _follow_curve(value, self.predicted, self.measured)

    def find_prediction(self, value: float) -> float:
        """The prediction at which so much is to be expected."""
        return _follow_curve(value, self.measured, self.predicted)


def _follow_curve(value: float, x: Sequence[float], y: Sequence[float]) -> float:
    """Between points by a line, beyond them in proportion."""
    if not 0 < value < math.inf:
        return value
    at = math.log(value)
    # Beyond the ends nothing was measured: the last ratio holds.
    inside = min(max(at, x[0]), x[-1])
    return math.exp(float(np.interp(inside, x, y)) + at - inside)


def bisect_noise(failing: Sequence[float], holding: Sequence[float]) -> float:
    """A prediction between the least at which something fails and the most below at which it holds.

    For figures that are no smooth function of the noise. Infinite where nothing fails.
    """
    high = min(failing, default=math.inf)
    low = max((noise for noise in holding if noise < high), default=0.0)
    if high == math.inf:
        return math.inf
    # The middle in dB, or 6 dB less.
    return math.sqrt(low * high) if low else high / 4
