"""Scales that a plan lacks, or that no longer fit a person's edits of it: computed again, with a line for each."""

from dataclasses import replace

from onnxq.errors import PlanError
from onnxq.graph import get_index
from onnxq.passes import FloatState, RunContext
from onnxq.passes.mixed_precision.candidates import keep_corrections
from onnxq.plan import Plan, drop_stale
from onnxq.sites import Caution, Cautions


def renew_numbers(ctx: RunContext, state: FloatState, plan: Plan) -> tuple[Plan, Cautions]:
    """The plan with numbers at every site, and a line for each whose numbers were computed again though it had some.

    Raises PlanError naming the activation that needs samples where there are none.
    """
    plan, stale = drop_stale(plan)
    # Without corrections for errors of weights that are no longer so, or no longer quantized.
    current = (site for site in plan.sites if site.site not in stale)
    biases = keep_corrections(plan, current, get_index(state.model))
    why = "the model's own bias, since the plan's made up for a weight that is quantized otherwise"
    lines = [Caution("W121", f"{bias.edge}: {why}") for bias in plan.biases if bias not in biases]
    plan = replace(plan, biases=biases)
    missing = [site for site in plan.sites if not site.complete]
    for site in missing:
        # Weights and biases have their values in the model; activations only in samples.
        if site.role.is_measured and ctx.samples is None:
            cause = stale.get(site.site, "the plan has no scale for it")
            fix = "give samples that it is calibrated on, `data=…`"
            if site.site in stale:
                fix += ", or write the scale and zero_point you mean beside the new spec"
            else:
                fix += (
                    ", or a plan with its numbers, as `onnxq quantize` writes one by `plan_out=…`"
                )
            raise PlanError(site.name, cause, fix, code="Q405")
    if missing:
        samples = None if ctx.samples is None else ctx.samples.calibration
        plan = ctx.calibrate(state.model, plan, samples, progress=ctx.progress)
        if ctx.samples is not None:
            plan = replace(plan, data=ctx.samples.description)
    done = plan.by_site
    for where, cause in stale.items():
        measured = done[where].role.is_measured
        text = f"{where}: {cause}: computed again from the {'samples' if measured else 'model'}"
        lines.append(Caution("W121", text))
    return plan, tuple(lines)
