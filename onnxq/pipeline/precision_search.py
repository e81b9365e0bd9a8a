"""The search for the precision of each operator under limits on bytes, time and accuracy.

An integer programme chooses by what precisions cost alone (`precisions`). That errors of many roundings add up, and
that times do, holds only roughly. So some choices along the front are made into finished models and measured, as whole
models are; a monotone curve through them maps what the programme predicts to what was measured, and it chooses again at
the limits, until its choice is one that was measured. Only measured models are given out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxq.arrays import Interval
from onnxq.backends import split_target
from onnxq.calibrate.contents import note_contents
from onnxq.config import Config, Rule, RuleSet
from onnxq.emit import leave_out_notes
from onnxq.errors import ConfigError
from onnxq.evaluation.accumulator import db_to_noise, noise_to_db
from onnxq.graph import ModelLike, widen_model
from onnxq.graph.light import measure_size
from onnxq.passes import FloatState, PlacedState, Timers, build_file, build_quantized, run_metric
from onnxq.passes.base import EqualizeContext, Stage, run_stage
from onnxq.passes.mixed_precision.candidates import SwitchedPlan, list_quantized_ops
from onnxq.passes.mixed_precision.cross_validation import estimate_new
from onnxq.passes.mixed_precision.precisions import (
    FLOAT,
    MeasuredPrecision,
    Precision,
    ProgramBuilder,
    find_takers,
    measure_precision,
)
from onnxq.passes.mixed_precision.program import Costs, PrecisionProgram, Precisions
from onnxq.passes.mixed_precision.promotion_search import Rescaling, bisect_noise
from onnxq.pipeline import check
from onnxq.pipeline.quantize_model import calibrate_run, draft_placement, list_passes
from onnxq.progress import silent
from onnxq.report.record import FrontPoint, FrontPoints, bound_db
from onnxq.runtime import detect_cpu

# Choices made anew at the limits, after the first measurements.
_ROUNDS = 3
# Of the operators that a precision is for, below which it is not worth a plan of its own.
_LEAST_SHARE = 0.1
# Of the noise that a precision has alone, the least that it is expected to add to that of others.
_LEAST_NOISE = 0.1
# How much of what a precision as a whole loses less than its operators alone is expected of a few of them, too.
_DAMPINGS = tuple(k / 10 for k in range(11))
SIZE = "size"
TIME = "time"
NOISE = "noise"


@dataclass(frozen=True)
class Limits:
    """Limits of a result: bytes, milliseconds, noise at every output, a least value of the metric."""

    size: float
    time: float
    noise: float
    metric: float

    @property
    def accuracy(self) -> bool:
        """True where an accuracy is asked for."""
        return math.isfinite(self.noise) or math.isfinite(self.metric)


@dataclass(frozen=True, eq=False)
class _Point:
    """chosen: precision by operator. forecast: what the programme predicts, by what was measured before it; None of
    precisions as a whole. measured: of its finished model; time in ms, nan where it was not timed. sure: the noise of
    new samples, all but surely, where an SQNR is asked for."""

    chosen: Precisions
    forecast: Costs | None
    measured: Costs
    sure: float
    metric: float
    config: Config
    state: PlacedState
    # Timed twice: one run may meet a quiet moment.
    confirmed: bool = False

    def keeps_limits(self, limits: Limits) -> bool:
        measured = self.measured
        slow = not math.isnan(measured.time) and measured.time > limits.time
        poor = not math.isnan(self.metric) and self.metric < limits.metric
        return not (slow or poor or measured.size > limits.size or self.sure > limits.noise)


@dataclass
class PrecisionSearch:
    """One search. points: what was measured so far."""

    ctx: EqualizeContext
    model: FloatState
    precisions: Sequence[Precision]
    limits: Limits
    program: PrecisionProgram = field(init=False)
    # By precision: its noise as a whole, and that relative to the sum of its operators alone.
    wholes: dict[str, Interval] = field(default_factory=dict)
    points: list[_Point] = field(default_factory=list)
    # Milliseconds of the float model, as it was timed first; all others are in proportion to it.
    float_ms: float = math.nan

    @property
    def minimized(self) -> str:
        """The quantity that is to be least."""
        if not self.limits.accuracy:
            return NOISE
        return TIME if self.ctx.config.search.minimize == "latency" else SIZE

    @property
    def timed(self) -> bool:
        """True where times are asked for."""
        return math.isfinite(self.limits.time) or self.minimized == TIME

    def measure_all(self) -> None:
        """Measure precisions alone, choices along the front, then those at the limits."""
        measured = self._measure_precisions()
        own = measured[0]
        floats = any(precision.name == FLOAT for precision in self.precisions)
        # On other kinds a file may differ in time, which the limit is not about.
        program = ProgramBuilder(measured, floats, detect_cpu()).build_program()
        uniform = dict.fromkeys(program.operators, own.precision.name)
        # Notes, shapes, constants that stay float: alike in all mixtures, as far as that goes.
        rest = measure_size(self._write(own.state)) - program.add_costs(uniform).size
        self.program = replace(program, fixed=Costs(size=max(rest, 0.0)))
        for one in measured:
            # A precision of a few operators says little of mixtures.
            if 2 * len(one.operators) > len(own.operators):
                self._measure(uniform | dict.fromkeys(one.operators, one.precision.name), one.state)
        self._settle_noise()
        choices = self._list_front()
        with self.ctx.progress("measuring mixtures", len(choices)) as task:
            while choices:
                # Next to one that was measured, so that little is extrapolated.
                nearest = min(choices, key=self._find_distance)
                choices.remove(nearest)
                self._measure(nearest)
                task.advance()
        for _ in range(_ROUNDS):
            limits = {
                name: limit
                for name in (SIZE, TIME, NOISE)
                if (limit := self._predict_limit(name)) < math.inf
            }
            best = self.program.solve(self.minimized, limits)
            # Where it is one that was measured, the curves have nothing more to say.
            if best is None or self._is_known(best):
                return
            with self.ctx.progress("measuring what the limits allow"):
                self._measure(best)

    def _settle_noise(self) -> None:
        """Scale the noise of precisions so that those measured as a whole have theirs.

        Rounding that goes on from what operators in front have lost makes less of 4 bits in all than of each alone.
        """
        own, *others = self.points
        factor = own.measured.noise / (self._predict_costs(own).noise or math.inf)
        program = self.program.scale_noise({one.name: factor for one in self.precisions}, factor)
        factors = {}
        for point in others:
            name = next(iter(set(point.chosen.values()) - set(own.chosen.values())))
            alone = program.sum_noise(point.chosen, name)
            without = program.add_costs(point.chosen).noise - alone
            if alone:
                factors[name] = max(point.measured.noise - without, _LEAST_NOISE * alone) / alone
                self.wholes[name] = factors[name] * alone, factors[name]
        self.program = program.scale_noise(factors, 1.0)

    def _predict_costs(self, point: _Point) -> Costs:
        """The costs of a model by the programme."""
        return self.program.add_costs(point.chosen)

    def _forecast_noise(self, chosen: Precisions) -> float:
        """The noise to expect of a mixture, by all that was measured so far."""
        known = [point for point in self.points if point.measured.noise]
        mixtures = [point for point in known if point.forecast is not None]

        def sum_misses(damping: float) -> float:
            noises = ((p.measured.noise, self._add_noise(p.chosen, damping)) for p in mixtures)
            return sum(math.log(measured / added) ** 2 for measured, added in noises)

        # Noise is compared by ratios, as decibels are, so that loud mixtures do not decide alone.
        damping = min(_DAMPINGS, key=sum_misses)
        pairs = ((self._add_noise(p.chosen, damping), p.measured.noise) for p in self.points)
        return Rescaling.fit_pairs(pairs).expect_measurement(self._add_noise(chosen, damping))

    def _add_noise(self, chosen: Precisions, damping: float) -> float:
        """The programme's noise, in which few operators of a precision add up more like each alone than all do.

        The programme has each operator's share of what its precision loses as a whole (damping 0). With 1, few add what
        they lose alone, and all what the whole does.
        """
        noise = self.program.add_costs(chosen).noise
        for precision, (whole, ratio) in self.wholes.items():
            part = self.program.sum_noise(chosen, precision)
            growth = ratio + (1 - ratio) * part / whole
            noise += part * (growth**-damping - 1)
        return noise

    def choose_point(self) -> _Point:
        """The best that keeps the limits; the nearest to them where none does."""
        while True:
            holding = [point for point in self.points if point.keeps_limits(self.limits)]
            best = min(
                holding,
                key=lambda point: (getattr(point.measured, self.minimized), point.measured.noise),
                default=None,
            )
            if best is None:
                return min(self.points, key=self._miss)
            # A time that was lucky is taken back, and another may be best.
            if not self.timed or best.confirmed:
                return best
            again = max(best.measured.time, self._time(self._write(best.state)))
            better = replace(best, measured=best.measured._replace(time=again), confirmed=True)
            self.points[self.points.index(best)] = better

    def _miss(self, point: _Point) -> float:
        """How far the furthest limit is missed, as a ratio."""
        misses: list[float] = [
            getattr(point.measured, name) / getattr(self.limits, name) for name in (SIZE, TIME)
        ]
        misses.append(point.sure / self.limits.noise)
        # A metric has no unit: any loss counts more than a limit that is kept.
        if not math.isnan(point.metric) and point.metric < self.limits.metric:
            misses.append(1 + self.limits.metric - point.metric)
        return max(miss for miss in misses if not math.isnan(miss))

    def _measure_precisions(self) -> list[MeasuredPrecision]:
        """Each precision in a finished plan of its own, the configuration's first."""
        own = self.precisions[0]
        config = self.ctx.config
        # What would be no faster may be smaller; where times are asked for, that is no gain.
        plan = self._draft(config)
        small = [left.subject for left in plan[1].left_float if left.rule == "size"]
        if small and not self.timed:
            config = config.add_rules(Rule(node=tuple(small), set=RuleSet(quantize=True)))
            plan = self._draft(config)
        problem, before = plan
        names = frozenset(list_quantized_ops(problem, before))
        if not names:
            cause = "nothing of the model can be quantized"
            fix = "see `onnxq plan`"
            raise ConfigError("model", cause, fix, code="Q308")
        measured = []
        for one in self.precisions:
            # Float is no plan: the programme knows its costs, no noise and the weights as they are.
            if one.name == FLOAT:
                continue
            asked = config.add_rules(*one.make_rules(sorted(names)))
            takers = (
                names if one is own else find_takers(problem, before, self._draft(asked)[1], one)
            )
            # Each precision costs a calibrated and rounded plan, whatever it can bring.
            if len(takers) < _LEAST_SHARE * len(names):
                continue
            config_one = config.add_rules(*one.make_rules(sorted(takers)))
            with self.ctx.progress(f"quantizing to {one.name}"):
                state = self._refine(config_one)
            switched = SwitchedPlan(self.ctx, state, state.plan)
            # The samples of the choice and some of the calibration: on a handful errors do not add up as on many.
            floats = self.ctx.data.judges.float_outputs(state.model)
            measured.append(measure_precision(switched, state, floats, one, takers))
        return measured

    def _draft(self, config: Config) -> tuple[Any, Any]:
        problem = draft_placement(self.model, self.ctx.data, config, identified=False)
        return problem, problem.default()

    def _refine(self, config: Config) -> PlacedState:
        # What passes report of trial plans is no account of the run, which tells of the plan taken
        # alone.
        ctx = replace(self.ctx, config=config, journal=[], timers=Timers(), progress=silent)
        placed = calibrate_run(ctx, self.model)
        return run_stage(list_passes(ctx), Stage.REFINE, ctx, placed)

    def _list_front(self) -> list[Precisions]:
        """Choices of least noise at so many bytes, or microseconds, from the least that there is to the most."""
        # Along what is limited, or to be small.
        swept = TIME if self.timed and self.limits.size == math.inf else SIZE
        ends = (self.program.solve(minimized, {}) for minimized in (swept, NOISE))
        least, most = (getattr(self.program.add_costs(chosen or {}), swept) for chosen in ends)
        found: list[Precisions] = []
        count = self.ctx.config.search.points
        span = max(most, least) / max(least, 1e-9)
        for k in range(count):
            chosen = self.program.solve(NOISE, {swept: least * span ** (k / count)})
            if chosen is not None and not self._is_known(chosen, found):
                found.append(chosen)
        return found

    def _find_distance(self, chosen: Precisions) -> float:
        """How far its predicted noise is from that of the nearest model that was measured, as a logarithm."""
        noise = self.program.add_costs(chosen).noise
        known = filter(None, (self._predict_costs(point).noise for point in self.points))
        return (
            min((abs(math.log(noise / one)) for one in known), default=0.0) if noise else math.inf
        )

    def _is_known(self, chosen: Precisions, others: Iterable[Precisions] = ()) -> bool:
        """True where it is one that was measured, or one of others, but for what follows."""
        known = (*(point.chosen for point in self.points), *others)
        return any(
            all(one[name] == chosen[name] for name in chosen if self._computes(name))
            for one in known
        )

    def _measure(self, chosen: Precisions, state: PlacedState | None = None) -> None:
        """Make and measure the model with these precisions. state: of its plan, where there is one."""
        whole = state is not None
        config = self._settle_config(chosen) if state is None else state.problem.config
        state = self._refine(config) if state is None else state
        ctx = self.ctx
        plan = state.plan
        # All outputs must keep what is asked, so that the worst counts.
        outputs = ctx.data.judges.measure(state, plan)
        noise = max((db_to_noise(output.sqnr_db) for output in outputs), default=0.0)
        # What was chosen on some samples must hold on others.
        sure = noise
        if math.isfinite(self.limits.noise):
            sure = db_to_noise(estimate_new(ctx, state))
        model = self._write(state)
        time = self._time(model) if self.timed else math.nan
        metric = math.nan
        if ctx.request.metric is not None:
            metric = run_metric(ctx.request.metric, config, state, build_quantized(state, plan))
        measured = Costs(noise, measure_size(model), time)
        # Of whole precisions there is nothing yet to predict by.
        forecast = None
        if not whole:
            predicted = self.program.add_costs(chosen)
            size, time_ms = (
                self._fit(name).expect_measurement(getattr(predicted, name))
                for name in (SIZE, TIME)
            )
            forecast = Costs(self._forecast_noise(chosen), size, time_ms)
        self.points.append(_Point(chosen, forecast, measured, sure, metric, config, state))

    def _write(self, state: PlacedState) -> ModelLike:
        """The model as it will be in its file."""
        model = build_file(state, note_contents(state.plan, state.model))
        level = self.ctx.config.output.notes
        return model if level == "full" else leave_out_notes(model, level)

    def _time(self, model: ModelLike) -> float:
        """Milliseconds of a model: the float model's, by the ratio of both in turn, which a busy moment hits alike."""
        # Samples are float32, as the float model is that they are compared on.
        wide = widen_model(model) if self.model.types.interface else model
        time = check.time_both(
            self.model.named,
            wide,
            self.ctx.data.first,
            open_timer(self.ctx.config),
            threads=self.ctx.config.verify.threads,
        )
        if time is None:
            return math.nan
        self.float_ms = time.float_ms if math.isnan(self.float_ms) else self.float_ms
        return self.float_ms / time.ratio

    def _settle_config(self, chosen: Precisions) -> Config:
        """The configuration whose rules give these precisions, and force what the planner would leave float."""
        rules: list[Rule] = []
        # Rules name operators that compute: the others follow them.
        computing = {name: one for name, one in chosen.items() if self._computes(name)}
        for precision in self.precisions:
            rules += precision.make_rules(
                name for name, one in computing.items() if one == precision.name
            )
        config = self.ctx.config.add_rules(*rules)
        problem, plan = self._draft(config)
        # By the rules alone the planner would leave some float that do not pay beside the others.
        wanted = {name for name, one in computing.items() if one != FLOAT}
        missing = sorted(wanted.difference(list_quantized_ops(problem, plan)))
        if not missing:
            return config
        return self.ctx.config.add_rules(
            *rules, Rule(node=tuple(missing), set=RuleSet(quantize=True))
        )

    def _computes(self, name: str) -> bool:
        """False for operators that go with those around them."""
        choices = self.program.operators[name]
        return len(choices) > 2 or any(costs.size or costs.noise for costs in choices.values())

    def _predict_limit(self, name: str) -> float:
        """The prediction at which a limit is just kept; inf where there is none."""
        if name == NOISE and math.isfinite(self.limits.metric):
            least = self.limits.metric
            # A metric is no smooth function of the noise: it has no curve to read the limit from.
            noises = [(self._predict_costs(point).noise, point.metric) for point in self.points]
            failing = [noise for noise, metric in noises if metric < least]
            return bisect_noise(failing, [noise for noise, metric in noises if metric >= least])
        if name == NOISE:
            pairs = ((self._predict_costs(point).noise, point.sure) for point in self.points)
            return Rescaling.fit_pairs(pairs).find_prediction(self.limits.noise)
        limit = getattr(self.limits, name)
        return self._fit(name).find_prediction(limit)

    def _fit(self, name: str) -> Rescaling:
        return Rescaling.fit_pairs(
            (getattr(self._predict_costs(p), name), getattr(p.measured, name)) for p in self.points
        )

    def list_front(self, taken: _Point) -> FrontPoints:
        """All that was measured, from small to large."""
        kinds = [precision.name for precision in self.precisions]
        front = []
        for point in sorted(self.points, key=lambda one: one.measured.size):
            counts = Counter(one for name, one in point.chosen.items() if self._computes(name))
            forecast = point.forecast
            measured = point.measured
            front.append(
                FrontPoint(
                    precisions={kind: counts[kind] for kind in kinds if counts[kind]},
                    predicted_db=None
                    if forecast is None
                    else bound_db(noise_to_db(forecast.noise)),
                    sqnr_db=bound_db(noise_to_db(measured.noise)) or 0.0,
                    predicted_bytes=None if forecast is None else round(forecast.size),
                    bytes=int(measured.size),
                    predicted_ms=forecast.time if forecast is not None and self.timed else None,
                    latency_ms=measured.time if self.timed else None,
                    metric=None if math.isnan(point.metric) else point.metric,
                    holds=point.keeps_limits(self.limits),
                    taken=point is taken,
                )
            )
        return tuple(front)


def open_timer(config: Config) -> check.Timer:
    """The timer of the target's first engine. Raises ConfigError where this machine has none."""
    target = next(iter(split_target(config.target)))
    timer = check.find_timer(target, config.verify.threads or 1, config.runtime.plugins)
    if timer is None:
        cause = f"the engine of {target} cannot be timed on this machine"
        raise ConfigError("max_latency", cause, "limit the size or the accuracy", code="Q308")
    return timer
