"""Plans compared on the samples kept for choosing: what one stage found out, the next does not compute again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import onnx

from onnxq.data import Dataset
from onnxq.evaluation.compare import Array, OutputError, compare
from onnxq.graph import holding
from onnxq.graph.dequantized import weights_dequantized
from onnxq.passes.sweep import NARROW_BITS
from onnxq.pipeline.prepared import PreparedModel
from onnxq.pipeline.realise import paired, realise
from onnxq.plan import Plan
from onnxq.progress import Progress, counted, silent
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.targets import target

# Outputs beyond this are computed again rather than kept, and so are all but the last few plans' errors.
_MOST_BYTES = 2**26
_PLANS = 4
# Samples of the calibration among the judges.
_SEEN = 8


def judges_of(calibration: Dataset, trial: Dataset, seed: int) -> Dataset:
    """The samples whose outputs tell whether ranges and rounded weights are kept: `trial` and some of the calibration.

    Those hold the extremes, which are never held back and show what clipping costs (a ViT for TensorRT: 36.4 -> 36.4 dB
    on 8 held back, 35.7 -> 29.0 with 8 more, 34.6 -> 32.7 on new ones); and of a few held back none may be hard (four
    lines of text: the sweep seemed to cost 31 -> 28 dB, and brought 19 -> 23 on 160 others).
    """
    return calibration.take(_SEEN, seed).joined(trial)


class Recorded:
    """A float model that runs each sample once: further rounds over the same samples give what the first one gave."""

    def __init__(self, proto: onnx.ModelProto) -> None:
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
    errors: OrderedDict[tuple[int, int], tuple[onnx.ModelProto, Plan, tuple[OutputError, ...]]] = field(
        default_factory=OrderedDict
    )


_known: WeakKeyDictionary[Dataset, _Known] = WeakKeyDictionary()


def recorded(proto: onnx.ModelProto, held: Dataset) -> Recorded:
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


def trial_session(prepared: PreparedModel, plan: Plan) -> Session:
    """The model that the plan gives, to be run as the file says, or as users run it where the two may part.

    Its weights are let go of with the session.
    """
    with holding():
        if judged_as_run(plan):
            return Session(realise(prepared, plan))
        return Session(weights_dequantized(paired(prepared, plan)), optimize=False)


def plan_errors(
    prepared: PreparedModel, plan: Plan, held: Dataset, *, progress: Progress = silent
) -> tuple[OutputError, ...]:
    """Outputs of the model that the plan gives, as `trial_session` runs it, against the prepared float model's."""
    errors = _known.setdefault(held, _Known()).errors
    key = (id(prepared.proto), id(plan))
    if key not in errors:
        with progress("judging", len(held)) as task:
            pair = recorded(prepared.proto, held), trial_session(prepared, plan)
            found = compare({"": pair}, counted(held.samples(), task))[""]
        errors[key] = (prepared.proto, plan, found)
        if len(errors) > _PLANS:
            errors.popitem(last=False)
    return errors[key][2]


def sample_errors(
    prepared: PreparedModel, plan: Plan, held: Dataset, *, progress: Progress = silent
) -> list[tuple[OutputError, ...]]:
    """`plan_errors` of each sample alone, in their order."""
    with progress("judging sample by sample", len(held)) as task:
        pair = recorded(prepared.proto, held), trial_session(prepared, plan)
        return [compare({"": pair}, [feeds])[""] for feeds in counted(held.samples(), task)]


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
