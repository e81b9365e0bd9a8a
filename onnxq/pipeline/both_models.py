"""A float model and the quantized one made from it, brought to the same names and channels."""

from dataclasses import replace

from onnxq.annotate import read_model
from onnxq.emit import PLAN_KEY, unpack_plan
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, ModelSource, compute_fingerprint, name_nodes
from onnxq.graph.light import ModelLike, add_libraries, find_provider, list_libraries
from onnxq.graph.scopes import map_entries
from onnxq.passes import FloatState, RunContext, build_quantized
from onnxq.passes.equalization.passes import replay_scalings
from onnxq.passes.registry import list_rewrites
from onnxq.pipeline.prepared import load_state
from onnxq.pipeline.stale_numbers import renew_numbers
from onnxq.plan import Plan
from onnxq.planner import fit_plan


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
    proto = name_nodes(read_model(quantized).proto)
    note = map_entries(proto.metadata_props).get(PLAN_KEY, "")
    state = (
        load_planned(unpack_plan(note))
        if note
        # Another tool's: what it did to the model first is not known, so nodes are compared as they are in the file.
        else load_state(model, replace(ctx, skip=list_rewrites()))
    )
    return state, add_libraries(proto, list_libraries(state.named), find_provider(state.named))
