"""profile_model(): the cost of each quantized site, node and segment of a model at its outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxq.annotate import read_model
from onnxq.config import Command, Config
from onnxq.data import load_data
from onnxq.emit import PLAN_KEY
from onnxq.errors import ConfigError, PlanError
from onnxq.evaluation.profile import KINDS, Profile
from onnxq.evaluation.sensitivity import measure_sensitivity
from onnxq.graph import GraphIndex, ModelLike, add_libraries, compute_fingerprint, name_nodes
from onnxq.graph.light import find_provider, list_libraries
from onnxq.passes.assembly.model import build_quantized
from onnxq.passes.base import RunContext
from onnxq.passes.equalization.replay import replay_scalings
from onnxq.passes.registry import list_rewrites
from onnxq.passes.state import FloatState
from onnxq.pipeline.apply_plan import read_plan
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.prepared import load_state
from onnxq.pipeline.quantize_model import quantize
from onnxq.pipeline.scale.crews import open_crew
from onnxq.pipeline.stale_numbers import renew_numbers
from onnxq.plan import Plan, from_json
from onnxq.planner import fit_plan
from onnxq.progress import Progress, silent
from onnxq.workers import use_threads


def profile_model(
    model: ModelSource,
    quantized: ModelSource | None = None,
    data: object = None,
    config: Configuration = None,
    *,
    plan: Plan | str | Path | None = None,
    overrides: Overrides = None,
    progress: Progress = silent,
) -> Profile:
    """Switch quantized sites on and off, group by group, and measure the outputs against the float model's.

    quantized: a Q/DQ model made from `model`, by any tool; or plan: with its numbers. With neither, `model` is
    quantized as `quantize` would with this configuration. data, config, overrides: as for `quantize`; `samples`: how
    many to measure on. `by`: of "site", "node" (all that a node reads quantized) and "segment" (neighbouring nodes).

    Returns a Profile; `.groups` has the SQNR with each group alone quantized, and with all but it.
    Raises a subclass of OnnxqError for models that do not belong together, or data that does not fit.
    """
    if quantized is not None and plan is not None:
        raise ConfigError("plan", "a plan and a quantized model were given", "give one of them", code="Q317")
    with open_run(model, config, {**(overrides or {}), "verify.latency": False}, Command.PROFILE) as chosen:
        if quantized is None and plan is None:
            quantized = quantize(model, data, chosen, progress=progress).model
            what = f"quantized as {chosen.source or chosen.target} says"
        else:
            what = str(plan if quantized is None else quantized)
        with progress("reading the models"):
            ctx = RunContext(config=Config(runtime=chosen.runtime), progress=progress)
            state, proto = _load_both(model, ctx, quantized, plan)
        given = load_data(data, state.before.inputs, chosen.data, state.named, progress=progress)
        dataset = given.take(chosen.profile.samples, chosen.data.seed)
        with use_threads(chosen.scale.threads), open_crew(chosen.scale, model) as crew:
            found = measure_sensitivity(
                state.model,
                proto,
                dataset,
                kinds=chosen.profile.by or KINDS,
                threads=chosen.verify.threads,
                crew=crew,
                progress=progress,
            )
    return replace(
        found,
        source=str(model) if isinstance(model, (str, Path)) else "",
        # A model given as an object would print its whole text.
        quantized=what if len(what) < 500 else "",
        data=dataset.describe(),
        synthetic=dataset.synthetic,
    )


def _load_both(
    model: ModelSource, ctx: RunContext, quantized: ModelSource | None, plan: Plan | str | Path | None
) -> tuple[FloatState, ModelLike]:
    """The float model as the quantized one was made from it, and the quantized one."""
    if quantized is None:
        given = read_plan(plan) if plan is not None else None
        if given is None or not given.calibrated:
            fix = "use one that `onnxq quantize` wrote by `plan_out=…`"
            raise PlanError("plan", "it has no numbers yet", fix, code="Q405")
        state = replay_scalings(load_state(model, ctx, plan=given), given.scalings)
        rebased = fit_plan(given, GraphIndex(state.model), compute_fingerprint(state.model))
        # Without samples: activations that lack numbers are an error, weights get theirs from the model.
        renewed, _ = renew_numbers(RunContext(), state, rebased)
        return state, build_quantized(state, renewed)
    proto = name_nodes(read_model(quantized).proto)
    held = next((entry.value for entry in proto.metadata_props if entry.key == PLAN_KEY), "")
    if not held:
        # Another tool's: what it did to the model first is not known, so nodes are compared as they are in the file.
        state = load_state(model, replace(ctx, skip=list_rewrites()))
    else:
        noted = from_json(held, source=PLAN_KEY)
        state = replay_scalings(load_state(model, ctx, plan=noted), noted.scalings)
    return state, add_libraries(proto, list_libraries(state.named), find_provider(state.named))
