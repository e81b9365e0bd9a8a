"""A float model and the quantized one made from it, brought to the same names and channels.

Scales that a plan lacks, or that no longer fit a person's edits of it, are computed again, with a line for each.
"""

from dataclasses import replace

from onnxq.annotate import read_model
from onnxq.emit import PLAN_KEY, unpack_plan
from onnxq.engines.diff.compare import check_pair
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, ModelSource, compute_fingerprint, get_index, name_nodes
from onnxq.graph.light import ModelLike, add_libraries, find_provider, list_libraries
from onnxq.graph.scopes import map_entries
from onnxq.passes import FloatState, RunContext, build_quantized
from onnxq.passes.equalization.passes import replay_scalings
from onnxq.passes.mixed_precision.candidates import keep_corrections
from onnxq.passes.registry import list_rewrites
from onnxq.pipeline.prepared import load_state
from onnxq.plan import Plan, drop_stale
from onnxq.planner import fit_plan
from onnxq.sites import Caution, Cautions


def load_both(
    model: ModelSource, ctx: RunContext, quantized: ModelSource | None, noted: Plan | None = None
) -> tuple[FloatState, ModelLike]:
    """The float model as the quantized one was made from it, and the quantized one.

    noted: a plan with its numbers, in the place of a quantized model. Raises PlanError for one without.
    """

    def load_planned(plan: Plan) -> FloatState:
        return replay_scalings(load_state(model, ctx, plan=plan), plan.scalings)

    if quantized is None:
        if noted is None or not noted.calibrated:
            fix = "use one that `onnxq quantize` wrote by `plan_out=…`"
            raise PlanError("plan", "it has no numbers yet", fix, code="Q405")
        state = load_planned(noted)
        rebased = fit_plan(noted, GraphIndex(state.model), compute_fingerprint(state.model))
        # Without samples: activations that lack numbers are an error, weights get theirs from the model.
        renewed, _ = renew_numbers(RunContext(), state, rebased)
        return state, build_quantized(state, renewed)
    proto = name_nodes(read_model(quantized, lazy=True).light)
    note = map_entries(proto.metadata_props).get(PLAN_KEY, "")
    state = (
        load_planned(unpack_plan(note))
        if note
        # Another tool's: what it did to the model first is not known, so nodes are compared as they are in the file.
        else load_state(model, replace(ctx, skip=list_rewrites()))
    )
    check_pair(state.before, get_index(proto))
    return state, add_libraries(proto, list_libraries(state.named), find_provider(state.named))


def renew_numbers(ctx: RunContext, state: FloatState, plan: Plan) -> tuple[Plan, Cautions]:
    """The plan with numbers at every site, and a line for each whose numbers were computed again though it had some.

    Raises PlanError naming the activation that needs samples where there are none.
    """
    plan, stale = drop_stale(plan)
    # Without corrections for errors of weights that are no longer so, or no longer quantized.
    current = (site for site in plan.sites if site.site not in stale)
    biases = keep_corrections(plan, current, state.index)
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
