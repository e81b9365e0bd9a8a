"""Relief: an operator whose input alone makes most of the noise at the outputs stays float.

Networks of depthwise convolutions often have one (EfficientNet-Lite0 for TensorRT: the first depthwise reads 127 levels
of ReLU6 and makes 3 of 4 parts of the noise; float, 20.0 dB become 24.4 at the outputs, for one operator of 50). The
noise of activations adds up, so such a site is found by halves: whichever half of the network's pairs makes more than
half of the noise is cut again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.profile import decibel
from onnxq.evaluation.toggled import Setting, Switch, measure, switchboard
from onnxq.pipeline.candidates import FLOAT, Ways, finished, operators_of
from onnxq.pipeline.promotion import Ground
from onnxq.pipeline.realise import paired
from onnxq.plan import Plan
from onnxq.planner import Draft
from onnxq.sites import Role

# One operator of so many may stay float for it, and a network of fewer has none to spare.
_EACH = 24
# Share of all the noise of activations that the input must make, and what may be left without that input, on other
# samples, where shares differ by chance.
_MOST, _LEFT = 0.5, 0.6
_SAMPLES = 2
_REASON = "its input alone makes most of the noise at the outputs"

_Noises = Callable[[Sequence[Setting]], list[float]]
Relieved = tuple[Plan, Draft, tuple[str, ...]]


def relieved(ground: Ground, plan: Plan) -> Relieved:
    """The calibrated plan and its draft with such operators float, and what was done in words; () where nothing was.

    ground: `calibration` is searched, `trial` confirms. Deterministic. Raises ModelError and DataError from the runs.
    """
    done: tuple[str, ...] = ()
    draft = ground.draft
    spare = len(operators_of(draft, plan)) // _EACH
    while len(done) < spare:
        found = _step(ground, draft, plan)
        if found is None:
            break
        plan, draft, line = found
        done = (*done, line)
    return plan, draft, done


def _step(ground: Ground, draft: Draft, plan: Plan) -> tuple[Plan, Draft, str] | None:
    prepared = ground.prepared
    with ground.progress("putting every pair behind a switch"):
        board = switchboard(prepared.proto, paired(prepared, plan), threads=ground.threads)
        samples = ground.calibration.take(_SAMPLES, ground.seed)
        few = FloatOutputs(prepared.proto, samples, threads=ground.threads)
    pairs = [one for one in board.switches if one.role is not Role.WEIGHT and one.role is not Role.BIAS]

    def noises(settings: Sequence[Setting], judging: bool = False) -> list[float]:
        reference = ground.trial.float_outputs(prepared.proto) if judging else few
        found = measure(board, reference, settings, progress=ground.progress, title="looking for the noise")
        return [one.noise() for one in found]

    whole = noises([frozenset(pairs)])[0]
    culprit = _loudest(pairs, whole, noises)
    computing = operators_of(draft, plan)
    keys = frozenset(culprit.readers).intersection(computing) if culprit is not None else frozenset()
    if culprit is None or len(keys) != 1:
        return None
    ways = Ways(draft, plan, FLOAT, ground.attention, _REASON)
    placed = ways.placed(keys)
    if len(ways.lost(placed)) != 1:
        return None
    kept = ways.setting(board, placed).intersection(pairs)
    before, after = noises([frozenset(pairs), kept], judging=True)
    if not after <= _LEFT * before:
        return None
    name = min(keys)
    line = f"{name} stays float: activations alone {decibel(before):.1f} -> {decibel(after):.1f} dB in a trial"
    made = finished(prepared, placed, ground.calibration, batch=ground.batch, limit=ground.memory_limit)
    return made, ways.left(keys), line


def _loudest(pairs: Sequence[Switch], whole: float, noises: _Noises) -> Switch | None:
    """The pair that alone makes more than half of `whole`."""
    while len(pairs) > 1:
        middle = len(pairs) // 2
        halves = (pairs[:middle], pairs[middle:])
        found = noises([frozenset(half) for half in halves])
        largest = max(found)
        if not largest > _MOST * whole:
            return None
        pairs = halves[found.index(largest)]
    return pairs[0] if pairs else None
