"""The account of an accuracy that was asked for, with the figures of the finished model."""

import math
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import ModelLike, emulate_types
from onnxq.passes import PlannedState, Promotion, RunContext, SampledContext, build_file, run_metric
from onnxq.passes.mixed_precision.cross_validation import find_optimism, split_folds
from onnxq.passes.mixed_precision.promotion import PROMOTED
from onnxq.pipeline import check
from onnxq.progress import count_items

_NO_TIME = "the budget ran out before anything was promoted"
_ALL_FLOAT = "nothing is quantized: only the float model holds this"
_CHANGED = (
    "it held where that was decided: before weights were rounded anew, and with optimizations off"
)


def answer_request(
    ctx: RunContext, state: PlannedState, model: ModelLike, trial: check.ModelCheck
) -> Promotion | None:
    """The account of promotion with the finished model's figures; None where nothing was asked for or done.

    trial: the check on samples held back. Without a request, and where the time or the memory is not for more, its
    figures decide, else all samples do, each on ranges that it had no part in.
    """
    account = PROMOTED.find(state)
    request = ctx.request
    plan = state.plan
    if account is None:
        if not request.asked:
            return None
        least = request.min_sqnr
        if least is None:
            least = request.max_drop.least(request.float_value)
        account = Promotion(
            asked=request.describe(),
            unit=request.unit,
            met=False,
            value=math.nan,
            least=least,
            note=_NO_TIME if plan.sites else "",
            float_value=request.float_value,
        )
    account = replace(account, required=request.asked)
    # A figure of few samples is made one of all where time and memory are enough.
    affordable = not trial.segments and ctx.budget.left() > 0
    if request.metric is not None:
        metric = request.metric
        # An evaluation of the caller's function may take minutes, so that a figure that still holds is
        # not measured again.
        if math.isnan(account.value) or account.steps or plan.precision is not None:
            with ctx.progress(f"running {metric.name} on the quantized model"):
                value = run_metric(metric, ctx.config, state, model)
            account = replace(account, value=value, met=value >= account.least)
    elif isinstance(ctx, SampledContext) and request.min_sqnr is not None and affordable:
        account = _estimate(ctx, state, account)
    else:
        account = _read_check(account, trial, find_target(plan.target).times_itself)
    # The float model keeps any accuracy, and is no answer to somebody who asked for a quantized
    # one.
    if not (plan.sites or plan.kept or plan.precision is not None):
        return replace(account, met=False, note=account.note or _ALL_FLOAT)
    return account


def _estimate(ctx: SampledContext, state: PlannedState, account: Promotion) -> Promotion:
    """The account with the SQNR that new samples will have."""
    errors = _measure_folds(ctx, state)
    if not errors.outputs:
        # No output holds numbers: nothing is known.
        return replace(account, value=math.nan, met=False)
    # Weights that were rounded for some of these samples make them look better than new ones.
    best = errors.estimate(find_optimism(state))
    part = "" if best.name in errors.outputs else best.name
    account = replace(
        account,
        value=best.sqnr_db,
        spread=best.spread_db,
        part=part,
        samples=errors.count,
    )
    if best.sqnr_db >= account.least:
        return replace(account, met=True)
    return replace(account, met=False, note=account.note or _CHANGED)


def _measure_folds(ctx: SampledContext, state: PlannedState) -> ModelErrors:
    """The errors of the finished model, as the file says or as users run it, whichever are larger."""
    folds = split_folds(ctx, state)
    here = find_target(state.plan.target).times_itself
    narrow = check.is_narrow(state)
    sums: dict[str, ModelErrors] = {}
    with ctx.progress("judging on all samples", sum(len(fold.samples) for fold in folds)) as task:
        for fold in folds:
            model = build_file(state, fold.narrow_ranges(state.model, state.plan), ctx.progress)
            fold_check = check.check_model(
                state.named,
                model,
                count_items(fold.samples.samples(), task),
                exact=emulate_types(model) if narrow else None,
                threads=ctx.config.verify.threads,
                optimized=here,
            )
            for label, errors in fold_check.errors.items():
                sums.setdefault(label, ModelErrors()).merge(errors)
    # Users meet whichever of both is worse, with optimizations or without.
    return min(sums.values(), key=lambda errors: errors.estimate().least_db)


def _read_check(account: Promotion, trial: check.ModelCheck, optimized: bool) -> Promotion:
    """The account with the figures of samples that nothing was chosen on."""
    values = []
    for output in trial.outputs:
        for run in range(2 if optimized and output.optimized else 1):
            part = output.parts[run]
            values.append((output.sqnr_db[run], output.name + part if part else ""))
    if not values:
        return replace(account, value=math.nan, met=False)
    worst, part = min(values, key=lambda value: value[0])
    return replace(account, value=worst, part=part, met=worst >= account.least)
