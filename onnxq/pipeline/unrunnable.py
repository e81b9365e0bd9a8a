"""Weights quantized without running the model: for want of its custom operators, or because it is too large."""

from __future__ import annotations

from dataclasses import replace

from onnxq.calibrate import calibrate
from onnxq.config import Config
from onnxq.graph.light import is_large_model
from onnxq.passes.assembly import build_file
from onnxq.passes.base import RunContext
from onnxq.passes.mixed_precision.embeddings import EMBEDDINGS
from onnxq.passes.runner import run_pass
from onnxq.passes.state import FloatState
from onnxq.pipeline.finalize import finalize_run
from onnxq.pipeline.result import Result
from onnxq.plan import Plan
from onnxq.planner import state_placement
from onnxq.report.model import Report
from onnxq.runtime import Session, UnknownOperatorError, has_custom
from onnxq.sites import Caution


def find_obstacle(state: FloatState, config: Config, *, measuring: bool) -> UnknownOperatorError | None:
    """The operator that ONNX Runtime lacks, where the weights can be quantized all the same; None elsewhere.

    measuring: samples or a demand on the accuracy were given, which only a run can serve.
    """
    if not rounds_alone(config, measuring=measuring):
        return None
    # Whether a custom operator needs a library, only ORT knows. A session of a large model takes seconds, so only those
    # are tried that may fail.
    if not has_custom(state.named):
        return None
    try:
        Session(state.named, optimize=False)
    except UnknownOperatorError as error:
        return error
    return None


def needs_no_run(state: FloatState, config: Config, *, measuring: bool) -> bool:
    """True for weights alone of a large model, which no session need hold. measuring: as for `find_obstacle`."""
    return rounds_alone(config, measuring=measuring) and is_large_model(state.model)


def rounds_alone(config: Config, *, measuring: bool) -> bool:
    """True where weights alone are rounded, and no error at the outputs says with how many bits.

    measuring: as for `find_obstacle`.
    """
    return not measuring and config.mode == "weight-only" and config.weight_bits_budget is None


def plan_unrun(state: FloatState, config: Config, name: str, obstacle: UnknownOperatorError | None) -> Plan:
    """The plan of the weights, by shapes that stand in the model alone. obstacle: None for a large model."""
    problem = state_placement(state.model, config, before=state.before, prepare=state.rewrites, name=name)
    ctx = RunContext(config=config, skip=frozenset(config.skip))
    plan = run_pass(EMBEDDINGS, ctx, state.add_placement(problem, problem.default())).plan
    reason = "weights alone need none"
    if obstacle is not None:
        reason = f"nothing was run, ONNX Runtime does not have {obstacle.subject}"
    return replace(plan, data=f"none: {reason}")


def quantize_unrun(
    ctx: RunContext, state: FloatState, *, source: object, name: str, obstacle: UnknownOperatorError | None
) -> Result:
    """Round the weights by their values alone. Only a large model (obstacle: None) is compared with the float one."""
    with ctx.timers.run("plan", "planning"):
        plan = plan_unrun(state, ctx.config, name, obstacle)
    with ctx.timers.run("calibrate", "calibrating"):
        plan = calibrate(state.model, plan, None, crew=ctx.crew, progress=ctx.progress)
    with ctx.timers.run("emit", "making the quantized model"):
        quantized = build_file(state, plan, ctx.progress)
    # The context has no samples, so that the end of the run checks the interface, and large models by made-up inputs.
    result = finalize_run(ctx, state.add_plan(plan), quantized, source=source)
    if obstacle is None:
        return result
    notes = (_explain(obstacle, result.report), *result.report.warnings)
    return replace(result, report=replace(result.report, warnings=notes))


def _explain(obstacle: UnknownOperatorError, report: Report) -> Caution:
    if report.checks:
        names = ", ".join(check.name for check in report.checks)
        return Caution(
            "W131",
            f"ONNX Runtime does not have {obstacle.subject}, so the result was compared with the float model in front "
            f"of it only, at {names}, and not timed. Give the library that implements it (`ort_library`) to check all.",
        )
    return Caution(
        "W123",
        f"NOTHING WAS RUN: ONNX Runtime does not have {obstacle.subject}, so the result was neither compared with the "
        "float model nor timed. Give the library that implements it (`ort_library`) to check it.",
    )
