"""Plans compared on the samples kept for choosing: what one stage found out, the next does not compute again."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np

from onnxq.data import Dataset
from onnxq.graph import ModelLike
from onnxq.graph.dequantized import weights_dequantized
from onnxq.passes.assembly.model import paired, realise
from onnxq.passes.base import State
from onnxq.passes.rounding.low_bit_core import NARROW_BITS
from onnxq.plan import Plan
from onnxq.progress import Progress, counted, silent
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.targets import target
from onnxq.verify import Array, OutputError, compare

# Outputs beyond this are computed again rather than kept, and so are all but the last few plans' errors.
_MOST_BYTES = 2**26
_PLANS = 4
# Above this an output is as good as float, dB; one such output must not outweigh the others.
_PERFECT_DB = 80.0


class Recorded:
    """A float model that runs each sample once: further rounds over the same samples give what the first one gave."""

    def __init__(self, proto: ModelLike) -> None:
        self.proto = proto
        self._session: Session | None = None
        self._kept: list[dict[str, Array]] = []
        self._bytes, self._at = 0, 0

    def rewound(self) -> Recorded:
        """Itself, at the first sample."""
        self._at = 0
        return self

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for the next sample."""
        at, self._at = self._at, self._at + 1
        if at < len(self._kept):
            return self._kept[at]
        if self._session is None:
            self._session = Session(self.proto, optimize=False)
        found: dict[str, Array] = self._session.run(feeds)
        self._bytes += sum(value.nbytes for value in found.values() if hasattr(value, "nbytes"))
        if at == len(self._kept) and self._bytes <= _MOST_BYTES:
            self._kept.append(found)
        return found


@dataclass(eq=False)
class _Known:
    """By the identity of models and plans, which are held so that nothing else takes their place."""

    floats: OrderedDict[int, Recorded] = field(default_factory=OrderedDict)
    errors: OrderedDict[tuple[int, int], tuple[ModelLike, Plan, tuple[OutputError, ...]]] = field(
        default_factory=OrderedDict
    )


_known: WeakKeyDictionary[Dataset, _Known] = WeakKeyDictionary()


def recorded(proto: ModelLike, held: Dataset) -> Recorded:
    """The float model on these samples, in their order, which must stay the same from round to round."""
    floats = _known.setdefault(held, _Known()).floats
    if id(proto) not in floats:
        floats.clear()
        floats[id(proto)] = Recorded(proto)
    return floats[id(proto)].rewound()


def judged_as_run(plan: Plan) -> bool:
    """True where this machine may compute something else than the file says, so that only running it tells."""
    engine = target(plan.target)
    return plan.saturation == "allow" and engine.saturates and engine.times_itself


def trial_session(state: State, plan: Plan) -> Session:
    """The model that the plan gives, to be run as the file says, or as users run it where the two may part."""
    if judged_as_run(plan):
        return Session(realise(state, plan))
    return Session(weights_dequantized(paired(state, plan)), optimize=False)


def plan_errors(state: State, plan: Plan, held: Dataset, *, progress: Progress = silent) -> tuple[OutputError, ...]:
    """Outputs of the model that the plan gives, as `trial_session` runs it, against the float model's."""
    errors = _known.setdefault(held, _Known()).errors
    key = (id(state.model), id(plan))
    if key not in errors:
        with progress("judging", len(held)) as task:
            pair = recorded(state.model, held), trial_session(state, plan)
            found = compare({"": pair}, counted(held.samples(), task))[""]
        errors[key] = (state.model, plan, found)
        if len(errors) > _PLANS:
            errors.popitem(last=False)
    return errors[key][2]


def sample_errors(
    state: State, plan: Plan, held: Dataset, *, progress: Progress = silent
) -> list[tuple[OutputError, ...]]:
    """`plan_errors` of each sample alone, in their order."""
    with progress("judging sample by sample", len(held)) as task:
        pair = recorded(state.model, held), trial_session(state, plan)
        return [compare({"": pair}, [feeds])[""] for feeds in counted(held.samples(), task)]


def mean_db(state: State, plan: Plan, samples: Dataset, *, progress: Progress = silent) -> float:
    """Mean SQNR in dB over the outputs of the model that the plan gives."""
    return _mean_db(plan_errors(state, plan, samples, progress=progress))


def answers_worse(state: State, plan: Plan, than: Plan, samples: Dataset, *, progress: Progress = silent) -> bool:
    """True where the samples, one by one, agree that `plan` answers worse: by more than their standard error.

    `mean_db` may hang on one sample alone: one letter of a line of text that is read otherwise.
    """
    each = [sample_errors(state, one, samples, progress=progress) for one in (plan, than)]
    gains = [_mean_db(one) - _mean_db(other) for one, other in zip(*each, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return statistics.fmean(gains) < -error


def _mean_db(found: Iterable[OutputError]) -> float:
    return float(np.mean([np.clip(one.sqnr_db, -_PERFECT_DB, _PERFECT_DB) for one in found] or [0.0]))


def few_bits(plan: Plan) -> bool:
    """True where any weight has so few that everything hangs on its rounding."""
    return any(site.role is Role.WEIGHT and site.spec.bits <= NARROW_BITS for site in plan.sites)


def before_rounding(plan: Plan) -> Plan:
    """What to judge scalings and ranges by, before the sweep has rounded the weights: of few bits, without them.

    Rounded to nearest these drown what activations lose: EfficientNet-Lite0 has -3 dB with weights of 4 bits whatever
    its ranges are, and 26 or 28 dB by the ranges once they are swept. Weight-only plans stay as they are.
    16-bit sums are left out too: rounding to nearest loses three times by them what the sweep does, which hides what
    smoothing gains (MiniLM: 19.5 dB in the end with them, 24.4 without).
    """
    activations = tuple(site for site in plan.sites if site.role not in (Role.WEIGHT, Role.BIAS))
    if activations and few_bits(plan):
        return replace(plan, sites=activations, biases=())
    if not any(site.sum_orders for site in plan.sites):
        return plan
    return replace(plan, sites=tuple(replace(site, sum_orders=()) for site in plan.sites))
