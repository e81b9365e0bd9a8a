"""Sensitive operators: one whose input alone makes most of the noise at the outputs stays float.

Networks of depthwise convolutions often have one (EfficientNet-Lite0 for TensorRT: the first depthwise reads 127
quantized values of ReLU6 and makes 3 of 4 parts of the noise; float, 20.0 dB become 24.4 at the outputs, for one
operator of 50). The noise of activations adds up, so such a site is found by halves: whichever half of the network's
pairs makes more than half of the noise is cut again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.profile import noise_to_db
from onnxq.evaluation.toggled import Setting, Switch, measure_settings, toggle_model
from onnxq.passes.assembly.model import write_pairs
from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.fixed_scales import fix_scales
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.mixed_precision.attention import PLAIN, has_attention_rules
from onnxq.passes.mixed_precision.candidates import Ways, calibrate_missing, list_quantized_ops
from onnxq.passes.mixed_precision.request import FLOAT, has_whole_bytes
from onnxq.passes.state import PlacedState
from onnxq.sites import Role

NAME = "sensitive_ops"
# One operator of so many may stay float for it, and a network of fewer has none to spare.
_EACH = 24
# Share of all the noise of activations that the input must make, and what may be left without that input, on other
# samples, where shares differ by chance.
_MOST, _LEFT = 0.5, 0.6
# Samples that are searched; the noise of activations is much alike on all.
_SAMPLES = 2
_REASON = "its input alone makes most of the noise at the outputs"

_Noises = Callable[[Sequence[Setting]], list[float]]


def exclude_sensitive_ops(ctx: SampledContext, state: PlacedState) -> tuple[PlacedState, PassReport]:
    """The calibrated plan with such operators float.

    The calibration samples are searched, those for validation confirm. Deterministic. Raises ModelError and DataError
    from the runs.
    """
    lines: tuple[str, ...] = ()
    spare = len(list_quantized_ops(state.problem, state.planned)) // _EACH
    while len(lines) < spare:
        found = _exclude_next(ctx, state)
        if found is None:
            break
        state, line = found
        lines = (*lines, line)
    return state, PassReport(NAME, lines, outcome=Outcome.KEPT if lines else Outcome.NO_GAIN)


def _exclude_next(ctx: SampledContext, state: PlacedState) -> tuple[PlacedState, str] | None:
    problem, plan = state.problem, state.planned
    with ctx.progress("putting every pair behind a switch"):
        twin = fix_scales(ctx, state, plan)
        toggled = toggle_model(state.model, write_pairs(state, twin), threads=ctx.config.verify.threads)
        samples = ctx.data.calibration.take(_SAMPLES, ctx.config.data.seed)
        few = FloatOutputs(state.model, samples, threads=ctx.config.verify.threads)
    pairs = [one for one in toggled.switches if one.role is not Role.WEIGHT and one.role is not Role.BIAS]

    def noises(settings: Sequence[Setting], judging: bool = False) -> list[float]:
        floats = ctx.data.judge.float_outputs(state.model) if judging else few
        found = measure_settings(
            toggled, floats, settings, progress=ctx.progress, title="looking for the noise", crew=ctx.crew
        )
        return [one.noise() for one in found]

    whole = noises([frozenset(pairs)])[0]
    culprit = _find_loudest(pairs, whole, noises)
    computing = list_quantized_ops(problem, plan)
    keys = frozenset(culprit.readers).intersection(computing) if culprit is not None else frozenset()
    # Where several operators read it, none of them alone is to blame.
    if culprit is None or len(keys) != 1:
        return None
    ways = Ways(problem, plan, FLOAT, has_attention_rules(ctx, state), _REASON)
    placed = ways.placed(keys)
    # Others that cannot do without it would have to go as well.
    if len(ways.lost(placed)) != 1:
        return None
    kept = ways.setting(toggled, placed).intersection(pairs)
    before, after = noises([frozenset(pairs), kept], judging=True)
    if not after <= _LEFT * before:
        return None
    figures = f"{noise_to_db(before):.1f} -> {noise_to_db(after):.1f} dB in a trial"
    line = f"{min(keys)} stays float: activations alone {figures}"
    return replace(state, plan=calibrate_missing(ctx, state, placed), problem=ways.left(keys)), line


def _find_loudest(pairs: Sequence[Switch], whole: float, noises: _Noises) -> Switch | None:
    """The pair that alone makes more than half of `whole`."""
    while len(pairs) > 1:
        middle = len(pairs) // 2
        halves = (pairs[:middle], pairs[middle:])
        found = noises([frozenset(half) for half in halves])
        largest = max(found)
        # Noise that no half makes alone comes from several, and no single operator mends it.
        if not largest > _MOST * whole:
            return None
        pairs = halves[found.index(largest)]
    return pairs[0] if pairs else None


def _may_exclude(ctx: SampledContext, state: PlacedState) -> bool:
    """True for 8-bit plans; attention, where it is to be tried, is noise that may still go."""
    if PLAIN.find(state) is not None or ctx.data.synthetic:
        return False
    pairs = any(site.role in (Role.ACTIVATION, Role.OUTPUT) for site in state.planned.sites)
    return pairs and has_whole_bytes(state.planned)


SENSITIVE_OPS = Pass(
    NAME, Stage.REFINE, exclude_sensitive_ops, "looking for operators to leave float", 0.2, applies=_may_exclude
)
