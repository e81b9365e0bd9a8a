"""Scales of each run in place of calibrated ones, in `mode: auto`, where held-back samples lose much less by them.

A tensor whose range moves with the input has one scale for all inputs in a static plan, and a scale for each run in a
dynamic one. Where the product behind still pays with the dearer quantizer, both are tried, each pair alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnxq.backends import list_costs
from onnxq.config import Rule
from onnxq.evaluation.toggled import measure_settings, toggle_model
from onnxq.passes.assembly.model import write_pairs
from onnxq.passes.base import Pass, RunContext, Stage, Trial
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import ignore_rounding
from onnxq.passes.mixed_precision.candidates import calibrate_missing, carry_numbers
from onnxq.passes.state import State
from onnxq.plan import Plan
from onnxq.planner import OnnxPlacement
from onnxq.planner.cut import CutProblem
from onnxq.planner.requests import Requests
from onnxq.sites import Role, TensorId
from onnxq.spec import QuantSpec

NAME = "dynamic_scales"
# What is left of the noise of the calibrated pair; and decibels that the outputs gain. One scale serves all that runs
# together, so that the gain is smaller in batches than on single samples (MiniLM: 23.9 dB alone, 19.6 in batches of 20,
# where calibrated scales have 24.4 and 24.3).
_LEFT, _GAIN_DB = 0.5, 1.0
_USUAL = QuantSpec(signed=False, symmetric=False)


def choose_scales(ctx: RunContext, state: State) -> tuple[State, PassReport]:
    """The plan with scales of each run where they leave less than half of a pair's noise."""
    problem, plan = state.problem, state.planned
    assert problem is not None
    readers = list_dynamic_candidates(problem, plan)
    if not readers:
        return state, PassReport(NAME, outcome=Outcome.NO_GAIN)
    static = measure_alone(ctx, state, plan)
    dynamic = measure_alone(ctx, state, make_dynamic(ctx, state, readers.values())[1])
    # A pair in the file serves all readers, one of each run a single reader.
    better = [
        names
        for names in readers.values()
        if sum(dynamic.get(name, 0.0) for name in names) < _LEFT * static.get(names[0], 0.0)
    ]
    if not better:
        return state, PassReport(NAME, outcome=Outcome.NO_GAIN)
    again, mixed = make_dynamic(ctx, state, better)
    lines = (f"{len(better)} of {len(readers)} tensors on scales of each run",)
    return replace(state, plan=mixed, problem=again), PassReport(NAME, lines)


def list_dynamic_candidates(problem: OnnxPlacement, plan: Plan) -> dict[TensorId, tuple[str, ...]]:
    """Tensors that MatMuls alone read in integers, and gain by it on a scale of each run too, with these MatMuls."""
    found: dict[TensorId, tuple[str, ...]] = {}
    kinds = list_costs(problem.engine, problem.config.cpu)
    costs = [CutProblem(problem.ops, dynamic=True).costs(kind) for kind in kinds]
    for site in plan.sites:
        tensor, edges = site.site, site.consumers
        if site.role is not Role.ACTIVATION or site.spec != _USUAL or not isinstance(tensor, TensorId) or not edges:
            continue
        ops = [problem.ops.by_name.get(edge.node) for edge in edges]
        names = tuple(op.name for op in ops if op is not None and op.node.op_type == "MatMul" and op.weights)
        pays = all(
            sum(one.ops[name].float_us - one.ops[name].int8_us for name in names) > one.quantize.get(tensor, 0.0)
            for one in costs
        )
        if len(names) == len(edges) and pays and not site.group:
            found[tensor] = names
    return found


def make_dynamic(ctx: RunContext, state: State, nodes: Iterable[tuple[str, ...]]) -> tuple[OnnxPlacement, Plan]:
    """The placement problem with a rule that makes these nodes dynamic, and its plan with the numbers there were."""
    problem = state.problem
    assert problem is not None
    rule = Rule.model_validate(
        {"node": [name for names in nodes for name in names], "role": "activation", "set": {"dynamic": True}}
    )
    config = problem.config.model_copy(update={"rules": (rule, *problem.config.rules)})
    again = replace(problem, config=config, requests=Requests(config, problem.requests.graph))
    # The model is the same, so its structural ids are; they take longer than planning does.
    vars(again)["ids"] = problem.ids
    plan = carry_numbers(state.planned, again.default(), problem.index)
    return again, calibrate_missing(ctx, state, plan)


def measure_alone(ctx: RunContext, state: State, plan: Plan) -> Mapping[str, float]:
    """Noise at the outputs of each pair of an activation alone, by the nodes that read it."""
    toggled = toggle_model(state.model, write_pairs(state, plan), threads=ctx.config.verify.threads)
    pairs = [one for one in toggled.switches if one.role is Role.ACTIVATION]
    floats = ctx.data.judge.float_outputs(state.model)
    settings = [frozenset([one]) for one in pairs]
    found = measure_settings(
        toggled, floats, settings, progress=ctx.progress, title="trying scales of each run", crew=ctx.crew
    )
    return {name: errors.noise() for one, errors in zip(pairs, found, strict=True) for name in one.readers}


def is_automatic(ctx: RunContext, state: State) -> bool:
    """True in `mode: auto`, for models whose operators were placed."""
    return ctx.config.mode == "auto" and state.problem is not None


DYNAMIC_SCALES = Pass(
    NAME, Stage.REFINE, choose_scales, "trying scales of each run", 0.2, applies=is_automatic,
    trial=Trial(
        score=lambda ctx, state: ctx.data.judge.score(state, ignore_rounding(state.planned), progress=ctx.progress),
        keeps=lambda _ctx, _before, _after, before, after: after >= before + _GAIN_DB,
    ),
)  # fmt: skip
