"""`onnxq import-calibration`: a TensorRT calibration cache and its model in, a plan with those scales out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxq.backends import list_backends
from onnxq.calibrate import calibrate
from onnxq.config import DEFAULT_TARGET, Config, Rule, RuleSet
from onnxq.errors import CalibrationError, ConfigError
from onnxq.graph import GraphIndex
from onnxq.interop import Cache, Findings, Imported, MissingSite, list_consumers, match_cache, read_cache, set_scales
from onnxq.nearest import suggest_names
from onnxq.passes.base import RunContext
from onnxq.passes.judging import SampleSets
from onnxq.passes.state import FloatState
from onnxq.pipeline.finalize import describe_rest
from onnxq.pipeline.prepared import load_state
from onnxq.pipeline.quantize_model import draft_placement
from onnxq.pipeline.samples import read_data
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.sites import Caution, Refusal

# The target where neither the configuration nor an option names one.
USUAL = next(backend.name for backend in list_backends() if backend.scales)
# Tensors that an error names; a cache of another model lacks hundreds.
_SHOWN = 4
_REASON = "reads or writes a tensor that the calibration cache has no scale for"
# Passes that make tensors which neither the model nor TensorRT, fusing it, has.
_MAKES_TENSORS = frozenset({"scalars"})


def choose_target(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The overrides of a caller without a configuration, with the presets' values that fit the scales of a cache."""
    given = {"target": USUAL, **{key: value for key, value in (overrides or {}).items() if value is not None}}
    # The default preset is asymmetric uint8, of which TensorRT's scales say nothing.
    fitting = (
        {"activations.scheme": "symmetric", "activations.signed": True} if given["target"] == DEFAULT_TARGET else {}
    )
    return {**fitting, **given}


def import_calibration(
    cache: str | Path | Cache,
    model: str | Path | onnx.ModelProto,
    data: object,
    config: Config,
    *,
    progress: Progress = silent,
) -> Imported:
    """Plan the model and give its activation sites the cache's scales; see `onnxq.import_calibration`."""
    scales = cache if isinstance(cache, Cache) else read_cache(cache)
    _demand_symmetric(config)
    name = Path(model).name if isinstance(model, (str, Path)) else "model"
    ctx = RunContext(config=config, skip=frozenset(config.skip), progress=progress)
    state = load_state(model, ctx)
    trial = _attempt(scales, state, read_data(state, data, config, progress=progress), config, name, progress)
    notes: tuple[Caution, ...] = ()
    # The calibrator saw the tensors of the file; without the pass that makes others it may have scales for more.
    made = sorted(frozenset(trial.state.rewrites) & _MAKES_TENSORS)
    if made and _lacks_own_tensor(trial):
        state = load_state(model, replace(ctx, skip=ctx.skip.union(made)))
        other = _attempt(scales, state, trial.samples, config, name, progress)
        if len(other.found.missing) < len(trial.found.missing):
            trial = other
            text = f"prepared without {', '.join(made)}, which makes tensors that TensorRT did not have"
            notes = (Caution("W114", text),)
    if trial.found.missing and data is None and not config.data.allow_missing:
        raise _refuse_missing(scales, trial.found)
    absent = tuple(replace(one, done="calibrated on the samples") for one in trial.found.absent)
    if trial.found.missing and data is None:
        trial, absent = _leave_missing_float(trial, config, scales, name, progress)
    found, samples = trial.found, trial.samples
    plan = calibrate(
        trial.state.model,
        set_scales(trial.plan, found.entries),
        samples.calibration if data is not None else None,
        batch=config.data.batch,
        memory_limit=config.data.memory_limit,
        progress=progress,
    )
    # Of the samples only if some of the numbers come from them.
    origin = f"TensorRT calibration cache {Path(scales.source).name} ({scales.header})"
    calibrated = data is not None and absent
    return Imported(
        plan=replace(plan, data=f"{origin}; {samples.description}" if calibrated else origin),
        cache=scales.source,
        header=scales.header,
        entries=len(scales.entries),
        matched=found.matched,
        unmatched=found.unmatched,
        unused=found.unused,
        missing=absent,
        notes=(*describe_rest(trial.state.rest), *notes, *found.notes),
    )


@dataclass(frozen=True, eq=False)
class _Trial:
    """A plan without numbers, of one way to prepare the model, and the cache's scales for it."""

    state: FloatState
    samples: SampleSets
    plan: Plan
    found: Findings


def _attempt(
    cache: Cache, state: FloatState, samples: SampleSets, config: Config, name: str, progress: Progress
) -> _Trial:
    with progress("planning"):
        drafted = draft_placement(state, samples, config, name, progress=progress)
        plan = drafted.default(attention=config.attention == "quantized")
        return _Trial(state, samples, plan, match_cache(cache, plan, state.before, GraphIndex(state.model)))


def _lacks_own_tensor(trial: _Trial) -> bool:
    """Preparation made a tensor that lacks a scale: no cache can ever have one for it."""
    before = trial.state.before
    names = {output for node in before.nodes for output in node.outputs} | {value.name for value in before.inputs}
    return any(one.tensor not in names for one in trial.found.absent)


def _demand_symmetric(config: Config) -> None:
    """Raise ConfigError unless activations are of the type that a cache has scales of, symmetric int8."""
    wish = config.activations
    if config.mode != "static":
        raise ConfigError(
            config.source or "mode", "calibrates no activations: there is nothing a calibration cache is for",
            "choose a static preset, e.g. trt-int8", code="Q321")  # fmt: skip
    if (wish.bits, wish.scheme, wish.is_signed, wish.storage or "int8") != (8, "symmetric", True, "int8"):
        raise ConfigError(
            f"{config.source or 'config'}: activations",
            "a calibration cache holds scales of symmetric int8, and this asks for something else",
            "write `activations: {bits: 8, scheme: symmetric, signed: true}`, or take trt-int8",
            code="Q321",
        )


def _refuse_missing(cache: Cache, found: Findings) -> CalibrationError:
    lines = []
    for one in found.absent[:_SHOWN]:
        hint = f" ({suggest_names(one.tensor, one.nearest)})" if one.nearest else ""
        lines.append(f"{one.tensor}{hint}")
    more = f", and {len(found.absent) - _SHOWN} more" if len(found.absent) > _SHOWN else ""
    total = len(found.absent) + len(found.matched)
    return CalibrationError(
        cache.source,
        f"has no scale for {len(found.absent)} of {total} tensors to be quantized: {', '.join(lines)}{more}",
        "calibrate them with `data=…`, or leave what reads them in float with `allow_missing=True`",
        code="Q507",
    )


def _leave_missing_float(
    trial: _Trial, config: Config, cache: Cache, name: str, progress: Progress
) -> tuple[_Trial, tuple[MissingSite, ...]]:
    """The plan with float in place of whatever reads a tensor without a scale, as TensorRT itself does.

    Leaving nodes float can move pairs to other tensors, so it is repeated; every round takes nodes out.
    """
    index = GraphIndex(trial.state.model)
    # Node -> the tensor that it lacks, over all rounds.
    left: dict[str, str] = {}
    absent: dict[str, MissingSite] = {}
    while trial.found.missing:
        readers = list_consumers(trial.found.missing, index)
        if not set(readers) - set(left):
            subject = str(trial.found.missing[0].site)
            raise CalibrationError(
                subject, "has no scale and cannot be left float", "calibrate it with `data=…`", code="Q507"
            )
        for one, site in zip(trial.found.absent, trial.found.missing, strict=True):
            nodes = ", ".join(list_consumers((site,), index))
            absent.setdefault(one.site, replace(one, done=f"left float: {nodes}"))
        left |= {node: tensor for node, tensor in readers.items() if node not in left}
        trial = _attempt(cache, trial.state, trial.samples, _add_float_rule(config, left), name, progress)
    refusals = tuple(Refusal(node, _REASON, "calibrate it with samples", "no-scale", "R106") for node in left)
    # The rule that leaves them float is ours, and gives another reason than the cache.
    others = tuple(refusal for refusal in trial.plan.refusals if refusal.subject not in left)
    floats = tuple(one for one in trial.plan.left_float if one.subject not in left)
    plan = replace(trial.plan, refusals=(*others, *refusals), left_float=floats)
    return replace(trial, plan=plan), tuple(absent.values())


def _add_float_rule(config: Config, nodes: Mapping[str, str]) -> Config:
    rule = Rule(node=tuple(f"/^{re.escape(node)}$/" for node in nodes), set=RuleSet(float=True))
    return config.model_copy(update={"rules": (rule, *config.rules)})
