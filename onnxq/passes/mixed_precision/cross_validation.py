"""Cross-validation of ranges: every sample is judged with ranges that it had no part in.

Ranges reach as far as the samples they were observed on, so these have fewer errors than new ones, which reach further:
a small ResNet has 43 dB on the 32 images it was calibrated with, 41 on each with the ranges of the others, and 39 on
2,000 new ones. The samples held back have fewer errors, too, as the extreme ones are never among them, and are few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxq.arrays import Interval
from onnxq.calibrate import calibrate
from onnxq.data import Dataset
from onnxq.evaluation.compare import FloatOutputs, ModelErrors
from onnxq.evaluation.trials import measure_models
from onnxq.graph import ModelLike, is_large_model
from onnxq.observers.histogram import WHOLE
from onnxq.passes.base import SampledContext
from onnxq.passes.judging import make_trial
from onnxq.passes.ranges import is_observed, read_range, scale_range, set_range
from onnxq.passes.rounding.passes import ROUNDED
from onnxq.passes.state import PlannedState
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Site

# Parts that the samples are cut into; each is another calibration, and another model to be run.
_FOLDS = 4
# Samples that a request is judged on, at most; from here on chance moves the figure by tenths of a decibel.
_MOST = 64
# What weights that were rounded for some of the samples may gain there and not on new ones, dB: nothing for two nets on
# Fashion-MNIST, 1.0 for EfficientNet-Lite0, of 32 samples each.
_ROUNDED_DB = 0.5


@dataclass(frozen=True, eq=False)
class Fold:
    """Some samples with the float model's answers, and the ranges of activations that the others have: by site.

    whole: those of all.
    """

    floats: FloatOutputs
    ranges: Mapping[Site, Interval]
    whole: Mapping[Site, Interval] = field(default_factory=dict)

    @property
    def samples(self) -> Dataset:
        """The samples."""
        return self.floats.samples

    def narrow_ranges(self, model: ModelLike, plan: Plan) -> Plan:
        """The calibrated plan as it would be without these samples: no range reaches further than that of the others.

        A range of the plan that was widened beyond all samples reaches as many times as far here. Weights keep their
        numbers.
        """
        changed = {}
        for site in plan.sites:
            if not is_observed(site) or site.site not in self.ranges:
                continue
            low, high = read_range(site)
            least, most = self.ranges[site.site]
            lowest, highest = self.whole.get(site.site, (low, high))
            least *= _measure_widening(low, lowest)
            most *= _measure_widening(high, highest)
            if least > low or most < high:
                changed[site.site] = replace(
                    site, qparams=set_range(site, max(low, least), min(high, most))
                )
        return _move_ranges(model, plan, changed)


def _measure_widening(end: float, reached: float) -> float:
    """How many times as far the end of a range lies as the values of all samples reach; 1 where these reach further."""
    return max(1.0, end / reached) if reached else 1.0


def widen_ranges(model: ModelLike, plan: Plan, factor: float, *, least_bits: int = 0) -> Plan:
    """The calibrated plan with ranges that reach so many times as far, where they are those of all values seen.

    least_bits: ranges of fewer stay.
    """
    existing = {site.group for site in plan.existing if site.group}
    changed = {
        site.site: replace(site, qparams=scale_range(site, factor))
        for site in plan.sites
        if is_observed(site)
        and site.observer.name == WHOLE
        and site.group not in existing
        and site.spec.bits >= least_bits
    }
    return _move_ranges(model, plan, changed)


def _move_ranges(model: ModelLike, plan: Plan, changed: Mapping[Site, SitePlan]) -> Plan:
    """The plan with these sites, and biases on their scales."""
    if not changed:
        return plan
    return calibrate(model, plan.replace_sites(changed))


def split_folds(ctx: SampledContext, state: PlannedState) -> tuple[Fold, ...]:
    """All samples in folds, those for the check among them. One fold, with all ranges, where nothing is observed.

    Deterministic. Raises what calibration raises.
    """
    samples = ctx.data
    seed = ctx.config.data.seed
    held_back = samples.validation.joined(samples.test)
    whole = samples.calibration.joined(held_back)
    judged = whole.take(max(_MOST, len(held_back)), seed) if len(whole) > _MOST else whole
    observed = any(map(is_observed, state.plan.sites))
    # Ranges of other runs are of other samples, too; and of a large model one at a time is held.
    folds = min(_FOLDS, len(judged)) if observed and not ctx.config.scale.ranges else 1
    if folds == 1 or is_large_model(state.model):
        return (Fold(answer_samples(ctx, state, judged), {}),)
    order = np.random.default_rng(seed).permutation(len(judged)).tolist()
    parts = [judged.part(sorted(order[k::folds])) for k in range(folds)]
    bare = state.plan.with_sites(map(_without_range, state.plan.sites))
    ranges = [_observe(ctx, state, bare, whole.without(part)) for part in parts]
    # Every sample is among the others of some fold.
    reached = {
        site: (min(others[site][0] for others in ranges), max(others[site][1] for others in ranges))
        for site in ranges[0]
    }
    return tuple(
        Fold(answer_samples(ctx, state, part), others, reached)
        for part, others in zip(parts, ranges, strict=True)
    )


def answer_samples(ctx: SampledContext, state: PlannedState, samples: Dataset) -> FloatOutputs:
    """The float model's outputs on some samples."""
    return FloatOutputs(state.model, samples, threads=ctx.config.verify.threads)


def estimate_new(
    ctx: SampledContext, state: PlannedState, folds: Sequence[Fold] | None = None
) -> float:
    """The SQNR in dB that new samples have all but surely with the state's plan. folds: as of `split_folds`."""
    folds = split_folds(ctx, state) if folds is None else folds
    errors = ModelErrors()
    with ctx.progress("judging on all samples", sum(len(fold.samples) for fold in folds)) as task:
        for fold in folds:
            trial = make_trial(state, fold.narrow_ranges(state.model, state.plan))
            errors.merge(measure_models([trial], fold.floats, ctx.crew, task)[0])
    return errors.estimate(find_optimism(state)).least_db


def find_optimism(state: PlannedState) -> float:
    """Decibels that the samples of all folds may have beyond new ones."""
    return _ROUNDED_DB if ROUNDED.is_left(state) else 0.0


def _observe(
    ctx: SampledContext, state: PlannedState, bare: Plan, samples: Dataset
) -> dict[Site, Interval]:
    """The ranges of activations on some samples, by the plan's own observers."""
    plan = ctx.calibrate(state.model, bare, samples, progress=ctx.progress)
    return {site.site: read_range(site) for site in plan.sites if is_observed(site)}


def _without_range(site: SitePlan) -> SitePlan:
    if is_observed(site):
        return replace(site, qparams=None)
    # Biases count in units of the ranges.
    return site.without_numbers() if site.role.is_bias else site
