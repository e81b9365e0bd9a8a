"""Promotion: what costs the outputs most leaves 8 bits, one after another, until what was wished for holds.

Ranking: what leaving a candidate out of the quantized model takes away from the noise at the outputs, per operator that
becomes float with it. Sites alone, as in an isolated scan, mislead where several spoil a result together; so operators,
tensors with all around them, and stretches are compared. Gains are measured again as the plan changes, the best first
(they only shrink as others are promoted, so one that still leads need not be compared with the rest).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from onnxq.data import Dataset
from onnxq.errors import ConfigError
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.metric import Drop, Metric
from onnxq.evaluation.toggled import Switchboard, measure, switchboard
from onnxq.pipeline.candidates import FLOAT, UINT16, Candidate, Ways, finished, operators_of
from onnxq.pipeline.judging import Evaluator
from onnxq.pipeline.prepared import PreparedModel
from onnxq.pipeline.realise import paired, realise
from onnxq.plan import Plan
from onnxq.planner import Draft
from onnxq.progress import OutOfTime, Progress
from onnxq.report import LOST_DB, Promotion, PromotionStep
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.targets import target

# A candidate that takes away less than this share of the best one's noise is not worth an operator.
_WORTH = 0.1
# Without a wish: not for more than this share of the operators; a model beyond is no int8 model any more.
_DEFAULT_SHARE = 0.5
_SCAN_SAMPLES = 8
# A gain measured again that is still this share of the next best one's wins.
_STILL = 0.98
# Further than this from what the file says, and rounding is not the reason.
_APART_DB = 1.0
# Noise that is not finite, as a number that can be compared.
_BROKEN = 1e30


@dataclass(frozen=True, eq=False)
class Wish:
    """min_sqnr in dB for every output, or a metric and what it may drop; neither: only what is lost is mended.

    to: "float" or "uint16".
    """

    min_sqnr: float | None = None
    metric: Metric | None = None
    max_drop: Drop = field(default_factory=lambda: Drop(0.0))
    to: str = FLOAT

    @property
    def asked(self) -> bool:
        """True when somebody asked for something."""
        return self.min_sqnr is not None or self.metric is not None


@dataclass(frozen=True, eq=False)
class Ground:
    """What promotion works with. calibration: to rank on, and for new numbers; trial: judges steps.

    attention: its rules are on. expired: there is no time for another step.
    """

    prepared: PreparedModel
    draft: Draft
    calibration: Dataset
    trial: Evaluator
    progress: Progress
    attention: bool = False
    threads: int = 1
    seed: int = 0
    batch: int | None = None
    memory_limit: int | None = None
    expired: Callable[[], bool] = lambda: False


@dataclass(frozen=True, eq=False)
class Outcome:
    """The plan, calibrated, and the account. promotion: None where nothing was asked for and nothing was wrong."""

    plan: Plan
    promotion: Promotion | None = None


@dataclass(frozen=True)
class _Step:
    """The promotions so far: keys, what was added last and what it brought. likely: dB that other samples will have."""

    keys: frozenset[str]
    name: str
    nodes: tuple[str, ...]
    before: float
    after: float
    likely: float


def promoted(ground: Ground, plan: Plan, wish: Wish) -> Outcome:
    """The plan with as little promoted as the wish takes, by the figures on samples kept for choosing.

    Without a wish: only where the worst output is below 10 dB, where answers are usually broken, and weights and
    activations have 8 bits at least; then until it is above, for at most half of the operators, or not at all.
    Raises ConfigError for uint16 where the target has no such pairs.
    """
    _check(plan, wish)
    if not wish.asked and (not whole_bytes(plan) or _good(ground, plan)):
        return Outcome(plan)
    search = _Search(ground, plan, wish.to)
    if wish.metric is not None:
        return _by_metric(search, wish, wish.metric)
    start = search.judged(frozenset())
    if wish.min_sqnr is not None:
        return _by_sqnr(search, wish.min_sqnr, start.likely_db())
    return Outcome(plan) if start.worst_db() >= LOST_DB else _mended(search)


def _check(plan: Plan, wish: Wish) -> None:
    if wish.to != UINT16:
        return
    engine = target(plan.target)
    if not any(
        16 in row.bits and "uint16" in row.storage for row in engine.capabilities if row.role is Role.ACTIVATION
    ):
        raise ConfigError(
            "promote_to: uint16", f"{plan.target} has no 16-bit activations", "promote to float", code="Q308"
        )


def _good(ground: Ground, plan: Plan) -> bool:
    """True when no output is lost, as the file answers; the search looks at it with its own switches."""
    found = ground.trial.measure(ground.prepared, plan, progress=ground.progress)
    return min((one.sqnr_db for one in found), default=math.inf) >= LOST_DB


def whole_bytes(plan: Plan) -> bool:
    """True when nothing has fewer than 8 bits: who asks for fewer knows what it costs."""
    return all(site.spec.bits >= 8 for site in plan.sites)


def _by_sqnr(search: _Search, wanted: float, start: float) -> Outcome:
    steps: list[_Step] = []
    at = start
    for step in search.in_time() if at < wanted else ():
        steps.append(step)
        at = step.likely
        if at >= wanted:
            break
    asked = f"at least {wanted:g} dB at every output"
    return search.outcome(steps, asked, "" if at >= wanted else search.end(), wanted)


def _mended(search: _Search) -> Outcome:
    most = max(1, int(_DEFAULT_SHARE * search.count))
    steps: list[_Step] = []
    at = -math.inf
    for step in search.in_time():
        steps.append(step)
        if len(search.lost(step.keys)) > most:
            break
        at = step.likely
        if at >= LOST_DB:
            break
    asked = f"no output below {LOST_DB:g} dB (the default)"
    if at < LOST_DB:
        blamed = ", ".join(step.name for step in steps[:3])
        note = f"half of the operators in float would not do; most is lost at {blamed}" if blamed else "nothing helps"
        return search.outcome([], asked, note, LOST_DB)
    return search.outcome(steps, asked, "", LOST_DB)


def _by_metric(search: _Search, wish: Wish, metric: Metric) -> Outcome:
    """Steps by SQNR; the metric looked at after 1, 2, 4, … of them, then halfway between the last two."""
    ground = search.ground
    optimize = target(search.plan.target).times_itself
    with ground.progress(f"running {metric.name} on the float model"):
        float_value = metric(ground.prepared.named, optimize=optimize, threads=ground.threads)
    least = wish.max_drop.least(float_value)
    values: dict[int, float] = {}
    steps: list[_Step] = []
    more = search.in_time()

    def value(count: int) -> float:
        if count not in values:
            with ground.progress(f"running {metric.name} with {count} promoted"):
                model = realise(ground.prepared, search.finished(steps[count - 1].keys if count else frozenset()))
                values[count] = metric(model, optimize=optimize, threads=ground.threads)
        return values[count]

    low, high, jump = -1, 0, 1
    while value(high) < least and not ground.expired():
        low = high
        steps += [step for step, _ in zip(more, range(jump), strict=False)]
        if len(steps) == high:
            break
        high, jump = len(steps), 2 * jump
    met = values[high] >= least
    while met and high - low > 1 and not ground.expired():
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) >= least else (middle, high)
    asked = f"{metric.name} at most {wish.max_drop} below float"
    note = "" if met else search.end()
    outcome = search.outcome(steps[:high], asked, note, least)
    if outcome.promotion is None:
        return outcome
    account = replace(outcome.promotion, unit=metric.name, met=met, value=values[high], float_value=float_value)
    return replace(outcome, promotion=account)


class _Search:
    """Greedy steps over one switchboard; over finished models, one operator each, where the engine answers otherwise.

    as_run: what ONNX Runtime makes of the plan with its optimizations on is worse than what the file says, so that is
    what steps are ranked and judged by. It costs a model for every candidate, where a switchboard costs a run.
    """

    def __init__(self, ground: Ground, plan: Plan, to: str) -> None:
        self.ground, self.plan = ground, plan
        self.ways = Ways(ground.draft, plan, to, ground.attention)
        with ground.progress("putting every pair behind a switch"):
            model = paired(ground.prepared, plan)
            self.board: Switchboard = switchboard(ground.prepared.proto, model, threads=ground.threads)
        samples = ground.calibration.take(_SCAN_SAMPLES, ground.seed)
        self.scan = FloatOutputs(ground.prepared.proto, samples, threads=ground.threads)
        self.trial = ground.trial.float_outputs(ground.prepared.proto)
        self.count = len(operators_of(ground.draft, plan))
        self.late = False
        self._plans: dict[frozenset[str], Plan] = {}
        self._known: dict[frozenset[str], float] = {}
        self.as_run = False
        if target(plan.target).times_itself:
            written = self._switched([frozenset()], self.trial, "judging")[0]
            run = self._finished([frozenset()], self.trial, "judging")[0]
            self.as_run = run.worst_db() < written.worst_db() - _APART_DB

    def placed(self, keys: frozenset[str]) -> Plan:
        """The plan with these promoted, new sites without numbers."""
        if keys not in self._plans:
            self._plans[keys] = self.ways.placed(keys)
        return self._plans[keys]

    def lost(self, keys: frozenset[str]) -> tuple[str, ...]:
        """Operators that are promoted with these keys."""
        return self.ways.lost(self.placed(keys))

    def finished(self, keys: frozenset[str]) -> Plan:
        """The calibrated plan with these promoted."""
        ground = self.ground
        return finished(
            ground.prepared, self.placed(keys), ground.calibration, batch=ground.batch, limit=ground.memory_limit
        )

    def judged(self, keys: frozenset[str]) -> ModelErrors:
        """The errors on the samples for judging."""
        return self._errors([keys], self.trial, "judging")[0]

    def in_time(self) -> Iterator[_Step]:
        """The steps, as long as there is time."""
        try:
            for step in self.steps():
                yield step
                if self.ground.expired():
                    raise OutOfTime
        except OutOfTime:
            self.late = True

    def end(self) -> str:
        """Why there are no more steps."""
        return "the budget ran out" if self.late or self.ground.expired() else "everything that could be promoted was"

    def steps(self) -> Iterator[_Step]:
        """One promotion after another, the best first, as long as any helps."""
        keys: frozenset[str] = frozenset()
        before = self.judged(keys).worst_db()
        candidates = self.ways.candidates()
        if self.as_run:
            candidates = tuple(one for one in candidates if len(one.keys) == 1)
        while True:
            begun = keys
            base = self._noises([keys])[0]
            queue = self._ranked(keys, base, candidates)
            while queue:
                _, _, name, candidate = heapq.heappop(queue)
                wider = keys | candidate.keys
                now = self._noises([wider])[0]
                score = _score(base - now, self._more(keys, wider))
                if score < 0 and queue and score > _STILL * queue[0][0]:
                    heapq.heappush(queue, (score, len(candidate.keys), name, candidate))
                elif score < 0:
                    found = self.judged(wider)
                    after = found.worst_db()
                    yield _Step(wider, name, self._more(keys, wider), before, after, found.likely_db())
                    keys, base, before = wider, now, after
            if keys == begun:
                return

    def _more(self, keys: frozenset[str], wider: frozenset[str]) -> tuple[str, ...]:
        held = set(self.lost(keys))
        return tuple(name for name in self.lost(wider) if name not in held)

    def _ranked(self, keys: frozenset[str], base: float, candidates: tuple[Candidate, ...]) -> list[_Entry]:
        """Candidates worth looking at, as a heap."""
        fresh = [one for one in candidates if self._more(keys, keys | one.keys)]
        gains = [base - noise for noise in self._noises([keys | one.keys for one in fresh])]
        best = max(gains, default=0.0)
        queue: list[_Entry] = []
        for one, gain in zip(fresh, gains, strict=True):
            if gain > _WORTH * best:
                more = self._more(keys, keys | one.keys)
                heapq.heappush(queue, (_score(gain, more), len(one.keys), one.name, one))
        return queue

    def _noises(self, settings: list[frozenset[str]]) -> list[float]:
        missing = [keys for keys in dict.fromkeys(settings) if keys not in self._known]
        if missing:
            for keys, errors in zip(missing, self._errors(missing, self.scan, "ranking"), strict=True):
                self._known[keys] = min(errors.noise(), _BROKEN)
        return [self._known[keys] for keys in settings]

    def _errors(self, settings: list[frozenset[str]], floats: FloatOutputs, title: str) -> list[ModelErrors]:
        return (self._finished if self.as_run else self._switched)(settings, floats, title)

    def _finished(self, settings: list[frozenset[str]], floats: FloatOutputs, title: str) -> list[ModelErrors]:
        """Of finished models, as users run them."""
        ground, found = self.ground, []
        with ground.progress(title, len(settings) * len(floats.samples)) as task:
            for keys in settings:
                session = Session(realise(ground.prepared, self.finished(keys)), threads=ground.threads)
                found.append(floats.measure(session, tick=task.advance))
        return found

    def _switched(self, settings: list[frozenset[str]], floats: FloatOutputs, title: str) -> list[ModelErrors]:
        """Of the switchboard: what the file says."""
        chosen = [self.ways.setting(self.board, self.placed(keys)) for keys in settings]
        return measure(self.board, floats, chosen, progress=self.ground.progress, title=title)

    def outcome(self, steps: list[_Step], asked: str, note: str, least: float) -> Outcome:
        """The plan after these steps, and the account; whether the wish holds is for the finished model to say."""
        keys = steps[-1].keys if steps else frozenset()
        lost = self.lost(keys)
        told = tuple(
            PromotionStep(name=one.name, to=self.ways.to, nodes=one.nodes, before=one.before, after=one.after)
            for one in steps
        )
        account = Promotion(
            asked=asked, unit="dB", met=False, value=math.nan, least=least, steps=told, operators=len(lost),
            left=self.count - len(lost), samples=len(self.trial.samples), note=note,
        )  # fmt: skip
        return Outcome(self.finished(keys), account)


_Entry = tuple[float, int, str, Candidate]


def _score(gain: float, operators: tuple[str, ...]) -> float:
    """For a heap: the more noise each operator takes away, the lower; 0 where there is no gain."""
    return -gain / len(operators) if gain > 0 and operators else 0.0
