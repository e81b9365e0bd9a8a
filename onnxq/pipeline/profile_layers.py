"""profile_model(): the cost of each quantized site, node and segment of a model at its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from onnxq.annotate import read_model
from onnxq.config import Config, check_number
from onnxq.data import load_data
from onnxq.emit import PLAN_KEY
from onnxq.errors import ConfigError, PlanError
from onnxq.evaluation.profile import KINDS, Profile
from onnxq.evaluation.sensitivity import measure_sensitivity
from onnxq.graph import GraphIndex, ModelLike, add_libraries, compute_fingerprint, name_nodes
from onnxq.graph.light import list_libraries
from onnxq.passes.assembly.model import build_quantized
from onnxq.passes.base import RunContext
from onnxq.passes.equalization.replay import replay_scalings
from onnxq.passes.state import State
from onnxq.pipeline.apply_plan import read_plan
from onnxq.pipeline.prepared import load_state
from onnxq.pipeline.quantize_model import Options, make_config, quantize
from onnxq.pipeline.stale_numbers import renew_numbers
from onnxq.plan import Plan, from_json
from onnxq.planner import fit_plan
from onnxq.progress import Progress, silent

ModelSource = str | Path | onnx.ModelProto
# A cost is a matter of decibels, which few samples settle.
_SAMPLES = 8


def profile_model(
    model: ModelSource,
    quantized: ModelSource | None = None,
    data: object = None,
    config: Config | str | Path | None = None,
    *,
    plan: Plan | str | Path | None = None,
    target: str | None = None,
    by: Sequence[str] = KINDS,
    samples: int | None = None,
    seed: int | None = None,
    threads: int = 1,
    ort_library: Sequence[str | Path] | str | Path = (),
    progress: Progress = silent,
) -> Profile:
    """Switch quantized sites on and off, group by group, and measure the outputs against the float model's.

    quantized: a Q/DQ model made from `model`, by any tool; or plan: with its numbers. With neither, `model` is
    quantized as `quantize` would with this configuration. data: as for `quantize`; samples: how many to measure on (8).
    ort_library: shared libraries with the custom operators of the models; also those of the section `runtime`.
    by: of "site", "node" (all that a node reads quantized) and "segment" (neighbouring nodes).

    Returns a Profile; `.groups` has the SQNR with each group alone quantized, and with all but it.
    Raises a subclass of OnnxqError for models that do not belong together, or data that does not fit.
    """
    if quantized is not None and plan is not None:
        raise ConfigError("plan", "a plan and a quantized model were given", "give one of them", code="Q317")
    check_number("samples", samples, low=1, whole=True)
    count = _SAMPLES if samples is None else samples
    settings = make_config(config, target, Options(seed=seed, latency=False, threads=threads, ort_library=ort_library))
    return _profile(model, quantized, data, settings, plan=plan, count=count, by=by, threads=threads, progress=progress)


def _profile(
    model: ModelSource,
    quantized: ModelSource | None,
    data: object,
    settings: Config,
    *,
    plan: Plan | str | Path | None,
    count: int,
    by: Sequence[str],
    threads: int,
    progress: Progress,
) -> Profile:
    if quantized is None and plan is None:
        result = quantize(model, data, settings, progress=progress)
        quantized, what = result.model, f"quantized as {settings.source or settings.target} says"
    else:
        what = str(plan if quantized is None else quantized)
    with progress("reading the models"):
        load = partial(load_state, model, libraries=settings.runtime.libraries, progress=progress)
        state, proto = _load_both(load, quantized, plan)
    given = load_data(data, state.before.inputs, settings.data, state.named, progress=progress)
    dataset = given.take(count, settings.data.seed)
    found = measure_sensitivity(state.model, proto, dataset, kinds=by, threads=threads, progress=progress)
    return replace(
        found,
        source=str(model) if isinstance(model, (str, Path)) else "",
        # A model given as an object would print its whole text.
        quantized=what if len(what) < 500 else "",
        data=dataset.describe(),
        synthetic=dataset.synthetic,
    )


def _load_both(
    load: Callable[..., State], quantized: ModelSource | None, plan: Plan | str | Path | None
) -> tuple[State, ModelLike]:
    """The float model as the quantized one was made from it, and the quantized one. load: `load_state` of the first."""
    if quantized is None:
        given = read_plan(plan) if plan is not None else None
        if given is None or not given.calibrated:
            raise PlanError("plan", "it has no numbers yet", "use one that `onnxq quantize` wrote", code="Q405")
        state = replay_scalings(load(only=given.prepare, target=given.target), given.scalings)
        rebased = fit_plan(given, GraphIndex(state.model), compute_fingerprint(state.model))
        # Without samples: activations that lack numbers are an error, weights get theirs from the model.
        renewed, _ = renew_numbers(RunContext(), state, rebased)
        return state, build_quantized(state, renewed)
    proto = name_nodes(read_model(quantized).proto)
    held = next((entry.value for entry in proto.metadata_props if entry.key == PLAN_KEY), "")
    if not held:
        # Another tool's: what it did to the model first is not known, so nodes are compared as they are in the file.
        state = load(only=())
    else:
        noted = from_json(held, source=PLAN_KEY)
        state = replay_scalings(load(only=noted.prepare, target=noted.target), noted.scalings)
    return state, add_libraries(proto, list_libraries(state.named))
