"""The equalization passes: observe channels, choose factors, write and replay them, prove the function unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxq.calibrate.taps import MANY, Taps
from onnxq.config import Config, Rule, RuleSet, match_names
from onnxq.data import Dataset, read_mask
from onnxq.errors import OnnxqError, PlanError
from onnxq.evaluation.trials import measure_models
from onnxq.graph import ModelLike, infer_shapes, is_large_model
from onnxq.passes.base import EqualizeContext, Pass, SampledContext, Stage, has_real_samples
from onnxq.passes.equalization import cross_layer, rotation, smoothquant
from onnxq.passes.equalization.smoothquant import ChannelStatistics, RunningStatistics
from onnxq.passes.equalization.token_scales import find_token_layers, write_token_scales
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import (
    THRESHOLDS,
    Trial,
    add_noises,
    has_few_bits,
    ignore_rounding,
    make_trial,
)
from onnxq.passes.patterns import unfit_plan
from onnxq.passes.state import FloatState, FloatStep, Note
from onnxq.plan import Plan, Rotation, Scaling
from onnxq.planner.recognize import Recognized
from onnxq.planner.rewritten import Anchors
from onnxq.runtime import Session
from onnxq.sites import Names, Role, TensorId
from onnxq.spec import RULED


def observe_channels(
    ctx: SampledContext,
    proto: ModelLike,
    axes: Mapping[TensorId, int],
    dataset: Dataset,
    title: str,
    *,
    rows: int = 0,
) -> dict[TensorId, ChannelStatistics]:
    """Low and high end of each channel along `axes`, and `rows` of its rows spread over the samples.

    A tensor that no sample reached, that cannot be observed or that held NaN or inf is not in the result.
    Raises ModelError and DataError from the runs.
    """
    if not axes:
        return {}
    taps = Taps(proto, list(axes), ctx.memory_limit, many=len(dataset) >= MANY)
    if not taps.tensors:
        return {}
    batch = ctx.config.data.batch
    groups = taps.form_groups(dataset.batches(batch))
    share = -(-rows // len(dataset))
    running: dict[TensorId, RunningStatistics] = {}
    with ctx.progress(title, len(groups) * len(dataset)) as task:
        for group in groups:
            last = -1
            for part, tensor, value in taps.run(group, dataset.batches(batch), dataset):
                axis = axes[tensor]
                statistics = running.setdefault(tensor, RunningStatistics(value.shape[axis], rows))
                statistics.extend_range(value, axis)
                if share:
                    flat = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
                    mask = read_mask(part.feeds, value.shape)
                    flat = flat if mask is None else flat[mask.ravel()]
                    statistics.keep_rows(flat, share * part.count)
                # A part comes once for each tensor of the group.
                if part.first_index != last:
                    task.advance(part.count)
                    last = part.first_index
    return {
        tensor: finished
        for tensor, statistics in running.items()
        if (finished := statistics.finish()) is not None
    }


CROSS_LAYER = "cross_layer_equalization"
ABSORPTION = "bias_absorption"
SMOOTHQUANT = "smoothquant"
ROTATION = "rotation"
TOKEN_SCALES = "token_scales"
# The record by which a plan equalizes the model again.
SCALINGS: Note[tuple[Scaling | Rotation, ...]] = Note("equalization")
# The layers that read tokens with scales, by name.
TOKEN_LAYERS: Note[Names] = Note("token layers")
# In the order in which they are found and repeated.
_WRITERS: dict[str, Callable[[ModelLike, smoothquant.Factors], ModelLike]] = {
    CROSS_LAYER: cross_layer.write_scales,
    ABSORPTION: cross_layer.write_shifts,
    SMOOTHQUANT: smoothquant.write_smoothing,
    TOKEN_SCALES: write_token_scales,
}


def write_factors(
    ids: Mapping[TensorId, str], state: FloatState, name: str, factors: smoothquant.Factors
) -> FloatState:
    """The state with the factors in its model's weights, and with the record of them for the plan.

    ids: structural identities in the model that the plan will be applied to, before any scaling.
    """
    records = [
        Scaling(name=name, tensor=tensor, factors=s, anchor=ids.get(tensor, ""))
        for tensor, s in factors.items()
    ]
    return _record(state, _WRITERS[name](state.model, factors), records)


def _record(
    state: FloatState, model: ModelLike, scalings: Sequence[Scaling | Rotation]
) -> FloatState:
    """The state with a scaled model, and with the records of its scalings for the plan."""
    records = (*(SCALINGS.find(state) or ()), *scalings)
    return SCALINGS.write(replace(state, model=infer_shapes(model)), records)


def replay_scalings(
    state: FloatState, scalings: Sequence[Scaling | Rotation], recognized: Recognized | None = None
) -> FloatState:
    """Repeat the scalings of a plan, on its model or on the same network exported again.

    recognized: the plan's tensors in a graph that other tools rewrote.
    Raises PlanError for a tensor that is not there, or that cannot take the factors.
    """
    if not scalings:
        return state
    for scaling in scalings:
        if isinstance(scaling, Scaling) and scaling.name not in _WRITERS:
            fix = f"use one of {', '.join((ROTATION, *_WRITERS))}"
            raise PlanError(f"scalings: {scaling.name}", "there is no such pass", fix, code="Q403")
    # All of them on the model before any scaling, which is what their anchors are of.
    anchors = Anchors(state.index, {}, lasting=False, recognized=recognized)
    located = [replace(scaling, tensor=_find_tensor(scaling, anchors)) for scaling in scalings]
    rotations = [scaling for scaling in located if isinstance(scaling, Rotation)]
    model = (
        infer_shapes(rotation.write_rotations(state.model, rotations)[0])
        if rotations
        else state.model
    )
    for name, write in _WRITERS.items():
        factors = {
            scaling.tensor: scaling.factors
            for scaling in located
            if isinstance(scaling, Scaling) and scaling.name == name
        }
        if factors:
            model = infer_shapes(write(model, factors))
    return replace(state, model=model)


def _find_tensor(scaling: Scaling | Rotation, anchors: Anchors) -> TensorId:
    tensor = anchors.find_tensor(scaling.tensor, scaling.anchor)
    if tensor is None:
        cause = "is scaled by the plan but not in this model"
        raise unfit_plan(scaling.tensor, cause)
    return tensor


# Rewrites reorder float32 arithmetic; anything below this, in dB, is a different function.
EQUIVALENT_DB = 60.0
# Samples that both float models are run on.
_PROOF = 2
# Noise that rounding by moments takes from weights, a network's mean, dB.
_ROUNDED_DB = 9.0
# An output that agrees better than this is as good as equal, dB.
_PERFECT_DB = 200.0


def check_equivalent(
    ctx: EqualizeContext, before: FloatState, after: FloatState, report: PassReport
) -> FloatStep:
    """The state after a pass, and its report with the largest change of a float output; the state before it where that
    is more than rounding."""
    floats = ctx.base.validation
    with ctx.progress("comparing with the model before", min(_PROOF, len(floats.samples))) as task:
        other = Session(floats.selections.take_choices(after.model), fuse_pairs=False)
        (errors,) = floats.sum_runs([other.run], limit=_PROOF, tick=task.advance)
    outputs = errors.results()
    worst = max((output.max_abs for output in outputs), default=0.0)
    # An output of zeros has no decibels, and rounding alone makes it another.
    if all(output.whole_db >= EQUIVALENT_DB or output.max_abs < 1e-6 for output in outputs):
        return after, replace(report, difference=worst)
    return before, PassReport(report.name, outcome=Outcome.NOT_EQUIVALENT, difference=worst)


def score_equalized(ctx: EqualizeContext, state: FloatState) -> float | None:
    """SQNR in dB of the worst output of the model quantized on a few samples; None if it cannot be.

    Judged on the samples that gave the ranges: the clipping of others is chance, and not the subject of scaling.
    """
    # By identity, and with the model itself, so that no other one can have its id.
    known = ctx.base.scores.get(id(state.model))
    if known is None:
        known = ctx.base.scores[id(state.model)] = state.model, _score(ctx, state)
    return known[1]


def score_rotated(ctx: EqualizeContext, state: FloatState) -> float | None:
    """As `score_equalized`; beside activations, weights of few bits count with the noise that rounding will leave."""
    activations = score_equalized(ctx, state)
    weights = _score(ctx, state, _keep_few_bits)
    if activations is None or weights is None:
        return activations
    return add_noises(activations, weights + _ROUNDED_DB)


def gains_by_rotation(ctx: EqualizeContext, before: float, after: float) -> bool:
    """True where a rotation is worth weights and names that change all over the model."""
    row = "rotation of weights alone" if ctx.config.mode == "weight-only" else "rotation"
    return THRESHOLDS[row].allows(before, after)


def _keep_few_bits(plan: Plan) -> Plan:
    """The weights of a plan that `ignore_rounding` takes them from; a plan of nothing for any other."""
    weights = tuple(site for site in plan.sites if site.role.is_weight)
    differs = has_few_bits(plan) and len(weights) < len(plan.sites)
    return replace(plan, sites=weights if differs else (), biases=())


def _score(
    ctx: EqualizeContext, state: FloatState, choose: Callable[[Plan], Plan] = ignore_rounding
) -> float | None:
    floats = ctx.base.trial
    try:
        plan = choose(ctx.place(state, ctx.progress))
        if not plan.sites:
            return None
        done = ctx.calibrate(state.model, plan, floats.samples, progress=ctx.progress)
        if not done.sites or not done.calibrated:
            return None
        with ctx.progress("judging", len(floats.samples)) as task:
            (errors,) = measure_models([make_trial(state, done)], floats, ctx.crew, task)
    except OnnxqError:
        # Equalization is given up rather than the run: the model before it may well be quantized.
        return None
    return min((min(output.sqnr_db, _PERFECT_DB) for output in errors.results()), default=None)


# Samples that show the largest values of channels. With fewer a channel that is silent on all of them is amplified, and
# clipped on the first that it speaks on: with 8 images a small ResNet has 30 to 36 dB on new ones by such values, 37 to
# 40 by weights alone; and 36.9 with 16 of 28 images, where all 28 see that it does not pay, and leave 39.7.
_SAMPLES = 16
_MOST = 64
# From here on no answer hangs on it, dB: a small ResNet of 40 to 42 dB had 36 in the end when it was equalized, and 39.
_GOOD_DB = 35.0
# A layer's error needs few rows of its input.
_ROWS = 256
# Signs that rotations are tried with. Of eight on a network, the best of four lay within a tenth of a dB of the best.
_SEEDS = 4


def equalize_layers(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Cross-layer equalization, Nagel et al. 2019."""
    fixed = _list_ruled(ctx, state)
    enough = len(ctx.data.calibration) >= _SAMPLES
    axes = cross_layer.list_channel_axes(state.model, fixed) if enough else {}
    samples = ctx.data.calibration.take(_MOST)
    observed = observe_channels(ctx, state.model, axes, samples, "equalizing")
    largest = {tensor: statistics.largest for tensor, statistics in observed.items()}
    # All or none: channels that share a factor need the values of every tensor they are in.
    factors = cross_layer.compute_factors(
        state.model, largest if len(largest) == len(axes) else None, fixed
    )
    factors = _drop_needless(ctx, state, factors)
    return _write(ctx, state, CROSS_LAYER, factors, [f"{tensor}: equalized" for tensor in factors])


def _drop_needless(
    ctx: EqualizeContext, state: FloatState, factors: smoothquant.Factors
) -> smoothquant.Factors:
    """The factors; {} where the quantized outputs are as good as float already."""
    score = score_equalized(ctx, state) if factors else None
    return factors if score is None or score < _GOOD_DB else {}


def absorb_biases(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Channels centred, and their means absorbed by the biases behind them, Nagel et al. 2019."""
    axes = cross_layer.list_shift_axes(state.model)
    samples = ctx.data.calibration.take(_MOST)
    observed = observe_channels(ctx, state.model, axes, samples, "absorbing")
    shifts = _drop_needless(ctx, state, cross_layer.choose_shifts(state.model, observed))
    lines = [f"{tensor}: channels centred" for tensor in shifts]
    return _write(ctx, state, ABSORPTION, shifts, lines)


def smooth_activations(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Outliers of activations moved into weights, SmoothQuant, Xiao et al. 2023."""
    plan = ctx.place(state, ctx.progress)
    # Of MatMul and Gemm, whose channels are the last axis of their input.
    axes = {group.tensor: -1 for group in smoothquant.find_quantized_groups(state.model, plan)}
    observed = observe_channels(
        ctx, state.model, axes, ctx.data.calibration, "smoothing", rows=_ROWS
    )
    return _write(
        ctx, state, SMOOTHQUANT, *smoothquant.compute_smoothing_factors(state.model, plan, observed)
    )


def rotate_channels(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Channels of streams rotated, the best of a few seeds, QuaRot, Ashkboos et al. 2024."""
    fixed = rotation.list_fixed(state.model)
    possible = rotation.list_rotations(state.model, 0)
    first = score_rotated(ctx, state) if possible else None
    best = state
    before = highest = -np.inf if first is None else first
    line = f"{fixed[0].subject} {fixed[0].reason}" if fixed else ""
    # A model too large for memory is written anew for each of them.
    seeds = 1 if is_large_model(state.model) else _SEEDS
    for k in range(0 if first is None else seeds):
        seed = ctx.config.data.seed + k
        rotations = [replace(draft, seed=seed) for draft in possible]
        model, copied = rotation.write_rotations(state.model, rotations)
        records = [replace(one, anchor=ctx.base.ids.get(one.tensor, "")) for one in rotations]
        after = _record(state, model, records)
        score = score_rotated(ctx, after)
        # Of those that are not taken nothing is kept in memory.
        ctx.base.scores.pop(id(after.model))
        if score is not None and score > highest:
            best = after
            highest = score
            noun = "stream" if len(rotations) == 1 else "streams"
            line = f"{len(rotations)} {noun} of channels, seed {seed}"
            if copied:
                line += f"; {', '.join(copied)} written for each reader, as their norms differ"
            if fixed:
                line += f"; {len(fixed)} left, {fixed[0].subject} {fixed[0].reason}"
        elif best is state:
            # Signs move the gain by less than there is to gain.
            break
    if best is state:
        return state, PassReport(ROTATION, (line,) if line else (), fixed, Outcome.NO_GAIN)
    if not gains_by_rotation(ctx, before, highest):
        return state, PassReport(ROTATION, (), fixed, Outcome.WORSE, (before, highest))
    report = PassReport(ROTATION, (line,), fixed, trial_db=(before, highest))
    return check_equivalent(ctx, state, best, report)


def scale_tokens(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """A scale for each token of the data that linear layers read."""
    plan = ctx.place(state, ctx.progress)
    index = state.index
    read = {
        edge
        for site in plan.sites
        if not site.role.is_constant
        for edge in site.find_readers(index)
    }
    tensors = {index.find_at(edge) for edge in read}
    scaled = {}
    for tensor in sorted(filter(None, tensors)):
        nodes = list(find_token_layers(index, tensor))
        # All layers or none: those that stay float would be given other numbers for nothing.
        if nodes and all(node.make_edge(0) in read for node in nodes):
            scaled[tensor] = nodes
    # Of 8 bits 127, so that both ends are whole steps away from 0, also where codes reach one further down.
    steps = dict.fromkeys(scaled, np.array([_find_half(ctx.config) - 1], np.float32))
    lines = [f"{tensor}: a scale a token" for tensor in scaled]
    after, report = _write(ctx, state, TOKEN_SCALES, steps, lines)
    if report.outcome is Outcome.KEPT:
        names = (node.name for nodes in scaled.values() for node in nodes)
        after = TOKEN_LAYERS.write(after, tuple(names))
    return after, report


def _find_half(config: Config) -> int:
    """Half of the levels of activations."""
    return 1 << (config.activations.bits - 1)


def add_token_rule(config: Config, state: FloatState) -> Config:
    """The configuration with the range that layers read whose tokens were scaled: a scale of 1."""
    layers = TOKEN_LAYERS.find(state)
    if not layers:
        return config
    half = _find_half(config)
    # The range of which a scale of 1 follows: symmetric types have as many levels on both sides.
    low = 1 - half if config.activations.scheme == "symmetric" else -half
    ends = RuleSet(dynamic=False, range=(float(low), float(half - 1)))
    rule = Rule(node=match_names(layers), role=(Role.ACTIVATION,), set=ends)
    return config.add_rules(rule)


def has_rotations(ctx: EqualizeContext, state: FloatState) -> bool:
    """True where samples are real, and the model has a residual stream.

    Corrections for inputs that never come are errors for those that do.
    """
    return has_free_values(ctx, state) and rotation.has_residual_stream(state.model)


def _write(
    ctx: EqualizeContext,
    state: FloatState,
    name: str,
    factors: smoothquant.Factors,
    lines: Sequence[str],
) -> FloatStep:
    """The state with the factors written, and the report, which says so where they change the function."""
    if not factors:
        return state, PassReport(name, tuple(lines), outcome=Outcome.NO_GAIN)
    after = write_factors(ctx.base.ids, state, name, factors)
    report = PassReport(name, (f"{len(factors)} tensors", *lines))
    return check_equivalent(ctx, state, after, report)


def _list_ruled(ctx: EqualizeContext, state: FloatState) -> set[TensorId]:
    """The tensors whose ranges rules give, in the values that the model computes as it came."""
    if has_free_values(ctx, state):
        return set()
    ruled = (
        site.site
        for site in ctx.place(state, ctx.progress).sites
        if site.qparams and site.qparams.origin == RULED
    )
    return {tensor for tensor in ruled if isinstance(tensor, TensorId)}


def has_free_values(ctx: EqualizeContext, state: FloatState) -> bool:
    """True where samples are real, and no rule gives a range, which would be that of other values."""
    return has_real_samples(ctx, state) and all(rule.set.range is None for rule in ctx.config.rules)


def serves_activations(ctx: EqualizeContext, state: FloatState) -> bool:
    """True where activations have scales, which these passes serve."""
    return has_real_samples(ctx, state) and ctx.config.mode in ("static", "auto")


TOKENS: Pass[EqualizeContext, FloatState] = Pass(
    TOKEN_SCALES,
    scale_tokens,
    "scaling tokens",
    0.05,
    fast=True,
    stage=Stage.EQUALIZE,
    applies=lambda ctx, _: ctx.config.token_scales and ctx.config.mode != "weight-only",
)
EQUALIZATION: tuple[Pass[EqualizeContext, FloatState], ...] = (
    # First: it takes the scales of normalizations, which smoothing writes to.
    Pass(
        ROTATION,
        rotate_channels,
        "rotating channels",
        0.2,
        stage=Stage.EQUALIZE,
        applies=has_rotations,
    ),
    Pass(
        CROSS_LAYER,
        equalize_layers,
        "equalizing channels across layers",
        0.1,
        stage=Stage.EQUALIZE,
        applies=serves_activations,
        trial=Trial(score_equalized, THRESHOLDS[CROSS_LAYER]),
    ),
    Pass(
        ABSORPTION,
        absorb_biases,
        "absorbing means into biases",
        0.1,
        stage=Stage.EQUALIZE,
        # A decibel more or less, depending on the samples, for a tenth of the time.
        applies=lambda ctx, state: (
            ctx.config.effort == "high"
            and serves_activations(ctx, state)
            and has_free_values(ctx, state)
        ),
        trial=Trial(score_equalized, THRESHOLDS[ABSORPTION]),
    ),
    Pass(
        SMOOTHQUANT,
        smooth_activations,
        "smoothing activations",
        0.15,
        stage=Stage.EQUALIZE,
        applies=has_free_values,
        trial=Trial(score_equalized, THRESHOLDS[SMOOTHQUANT]),
    ),
    TOKENS,
)
