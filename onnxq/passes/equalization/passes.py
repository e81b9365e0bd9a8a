"""The equalization passes: observe channels, choose factors, write them into weights, prove the function unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxq.graph.light import is_large_model
from onnxq.passes.base import EqualizeContext, Pass, Stage, has_real_samples
from onnxq.passes.equalization.bias_absorption import choose_shifts, list_shift_axes
from onnxq.passes.equalization.channel_statistics import observe_channels
from onnxq.passes.equalization.cross_layer import Factors, compute_factors, list_channel_axes
from onnxq.passes.equalization.replay import ABSORPTION, CROSS_LAYER, ROTATION, SMOOTHQUANT, rotate_state, write_factors
from onnxq.passes.equalization.rotation import has_residual_stream, list_fixed, list_rotations
from onnxq.passes.equalization.smoothquant import compute_smoothing_factors, find_quantized_groups
from onnxq.passes.equalization.smoothquant_core import ChannelStatistics
from onnxq.passes.equalization.trial import EQUALIZED, check_equivalent, gains_by_rotation, score_rotated
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.state import FloatState, FloatStep
from onnxq.plan import Rotation
from onnxq.sites import Refusal, TensorId

# Samples that show the largest values of channels. With fewer a channel that is silent on all of them is amplified, and
# clipped on the first that it speaks on: with 8 images a small ResNet has 30 to 36 dB on new ones by such values, 37 to
# 40 by weights alone; and 36.9 with 16 of 28 images, where all 28 see that it does not pay, and leave 39.7.
_SAMPLES, _MOST = 16, 64
# A layer's error needs few rows of its input.
_ROWS = 256
# Signs that rotations are tried with. Of eight on a network, the best of four lay within a tenth of a dB of the best.
_SEEDS = 4


def equalize_layers(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Cross-layer equalization, Nagel et al. 2019."""
    axes = list_channel_axes(state.model) if len(ctx.data.calibration) >= _SAMPLES else {}
    observed = _observe(ctx, state, axes, "equalizing")
    largest = {tensor: statistics.largest for tensor, statistics in observed.items()}
    # All or none: channels that share a factor need the values of every tensor they are in.
    factors = compute_factors(state.model, largest if len(largest) == len(axes) else None)
    return _write(ctx, state, CROSS_LAYER, factors, [f"{tensor}: equalized" for tensor in factors])


def absorb_biases(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Channels centred, and their means absorbed by the biases behind them, Nagel et al. 2019."""
    shifts = choose_shifts(state.model, _observe(ctx, state, list_shift_axes(state.model), "absorbing"))
    return _write(ctx, state, ABSORPTION, shifts, [f"{tensor}: channels centred" for tensor in shifts])


def smooth_activations(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Outliers of activations moved into weights, SmoothQuant, Xiao et al. 2023."""
    plan = ctx.place(state, ctx.progress)
    # Of MatMul and Gemm, whose channels are the last axis of their input.
    axes = {group.tensor: -1 for group in find_quantized_groups(state.model, plan)}
    observed = observe_channels(
        state.model, axes, ctx.data.calibration, progress=ctx.progress, title="smoothing", rows=_ROWS,
        batch=ctx.config.data.batch, memory_limit=ctx.memory_limit,
    )  # fmt: skip
    return _write(ctx, state, SMOOTHQUANT, *compute_smoothing_factors(state.model, plan, observed))


def rotate_channels(ctx: EqualizeContext, state: FloatState) -> FloatStep:
    """Channels of streams rotated, the best of a few seeds, QuaRot, Ashkboos et al. 2024."""
    fixed, possible = list_fixed(state.model), list_rotations(state.model, 0)
    before = score_rotated(ctx, state) if possible else None
    best, highest, line = state, before, f"{fixed[0].subject} {fixed[0].reason}" if fixed else ""
    # A model too large for memory is written anew for each of them.
    seeds = 1 if is_large_model(state.model) else _SEEDS
    for seed in range(ctx.config.data.seed, ctx.config.data.seed + seeds):
        if highest is None:
            break
        rotations = [replace(rotation, seed=seed) for rotation in possible]
        after, copied = rotate_state(ctx.base.ids, state, rotations)
        score = score_rotated(ctx, after)
        # Of those that are not taken nothing is kept in memory.
        ctx.base.scores.pop(id(after.model))
        if score is not None and score > highest:
            best, highest, line = after, score, _describe_rotation(rotations, copied, fixed)
        elif best is state:
            # Signs move the gain by less than there is to gain.
            break
    if before is None or highest is None or best is state:
        return state, PassReport(ROTATION, (line,) if line else (), fixed, Outcome.NO_GAIN)
    if not gains_by_rotation(ctx, before, highest):
        return state, PassReport(ROTATION, (), fixed, Outcome.WORSE, (before, highest))
    report = check_equivalent(ctx, best, PassReport(ROTATION, (line,), fixed, trial_db=(before, highest)))
    return (best if report.outcome is Outcome.KEPT else state), report


def _describe_rotation(rotations: Sequence[Rotation], copied: Sequence[str], fixed: Sequence[Refusal]) -> str:
    line = f"{len(rotations)} {'stream' if len(rotations) == 1 else 'streams'} of channels, seed {rotations[0].seed}"
    if copied:
        line += f"; {', '.join(copied)} written for each reader, as their norms differ"
    if fixed:
        line += f"; {len(fixed)} left, {fixed[0].subject} {fixed[0].reason}"
    return line


def has_rotations(ctx: EqualizeContext, state: FloatState) -> bool:
    """True where samples are real, and the model has a residual stream.

    Corrections for inputs that never come are errors for those that do.
    """
    return has_real_samples(ctx, state) and has_residual_stream(state.model)


def _observe(
    ctx: EqualizeContext, state: FloatState, axes: Mapping[TensorId, int], title: str
) -> dict[TensorId, ChannelStatistics]:
    samples, limit = ctx.data.calibration.take(_MOST), ctx.memory_limit
    return observe_channels(state.model, axes, samples, progress=ctx.progress, title=title, memory_limit=limit)


def _write(ctx: EqualizeContext, state: FloatState, name: str, factors: Factors, lines: Sequence[str]) -> FloatStep:
    """The state with the factors written, and the report, which says so where they change the function."""
    if not factors:
        return state, PassReport(name, tuple(lines), outcome=Outcome.NO_GAIN)
    after = write_factors(ctx.base.ids, state, name, factors)
    report = check_equivalent(ctx, after, PassReport(name, (f"{len(factors)} tensors", *lines)))
    return (after if report.outcome is Outcome.KEPT else state), report


def serves_activations(ctx: EqualizeContext, state: FloatState) -> bool:
    """True where activations have scales, which these passes serve."""
    return has_real_samples(ctx, state) and ctx.config.mode in ("static", "auto")


EQUALIZATION: tuple[Pass[EqualizeContext, FloatState], ...] = (
    # First: it takes the scales of normalizations, which smoothing writes to.
    Pass(
        ROTATION, Stage.EQUALIZE, rotate_channels, "rotating channels", 0.2, applies=has_rotations,
    ),
    Pass(
        CROSS_LAYER, Stage.EQUALIZE, equalize_layers, "equalizing channels across layers", 0.1,
        applies=serves_activations, trial=EQUALIZED,
    ),
    Pass(
        ABSORPTION, Stage.EQUALIZE, absorb_biases, "absorbing means into biases", 0.1,
        applies=serves_activations, trial=EQUALIZED,
    ),
    Pass(
        SMOOTHQUANT, Stage.EQUALIZE, smooth_activations, "smoothing activations", 0.15,
        applies=has_real_samples, trial=EQUALIZED,
    ),
)  # fmt: skip
