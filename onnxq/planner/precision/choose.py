"""Which nodes compute in a narrow float type, float16 or bfloat16, where no pair is; all others stay in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnxq.plan import KeepReason, KeptFloat32, Plan, PrecisionPlan
from onnxq.planner.build import OnnxPlacement, find_node_ids
from onnxq.planner.precision.casts import cut_casts
from onnxq.planner.precision.problem import PrecisionProblem
from onnxq.planner.precision.reasons import ReasonSearch, round_figure
from onnxq.spec import FloatType


def choose_types(problem: PrecisionProblem, *, more: Mapping[str, KeptFloat32] | None = None) -> PrecisionPlan:
    """The float types of every node. more: nodes to keep in float32 besides."""
    search = ReasonSearch(problem)
    kept = search.find_kept() | dict(more or {})
    wide = cut_casts(problem, kept)
    order = [name for name in problem.bindings if name in wide]
    narrow = [name for name in problem.bindings if name not in wide]
    limited = tuple(edge for name in narrow for edge in search.list_limited(problem.index.node(name)))
    return PrecisionPlan(
        type=problem.kind,
        nodes=sum(bool(problem.writes(problem.index.node(name))) for name in narrow),
        kept=tuple(kept.get(name, KeptFloat32(node=name, reason=KeepReason.CASTS)) for name in order),
        limited=limited,
    )


def find_suspects(problem: PrecisionProblem, chosen: PrecisionPlan) -> Iterable[KeptFloat32]:
    """The narrow nodes, those first whose results suffer most, to be kept in float32 where the whole loses too much."""
    kept = {one.node for one in chosen.kept}
    found: dict[str, float] = {}
    for tensor, errors in problem.errors.items():
        maker = problem.index.producer(tensor)
        if maker is not None and maker.name in problem.bindings and maker.name not in kept:
            found[maker.name] = min(errors.inputs_db, errors.own_db, found.get(maker.name, math.inf))
    order = sorted(found, key=lambda name: (found[name], name))
    return [KeptFloat32(node=name, reason=KeepReason.TRIAL, figure=round_figure(found[name])) for name in order]


# From these opsets on QuantizeLinear takes float16, and convolutions bfloat16.
_FLOAT16_OPSET, _BFLOAT16_OPSET = 19, 22


def find_type_opset(plan: Plan, kind: FloatType) -> int:
    """The lowest opset in which the plan can be written with this float type."""
    if kind is FloatType.BFLOAT16:
        return _BFLOAT16_OPSET
    return _FLOAT16_OPSET if plan.all_sites and kind is FloatType.FLOAT16 else 0


def add_precision(plan: Plan, chosen: PrecisionPlan, placement: OnnxPlacement | None) -> Plan:
    """The plan with these types, in an opset that has pairs of them, and the structural ids of the nodes they name."""
    opset = max(plan.opset, find_type_opset(plan, chosen.type))
    names = [*(one.node for one in chosen.kept), *(edge.node for edge in chosen.limited)]
    ids = {} if placement is None else find_node_ids(placement.index, names, placement.ids)
    return replace(plan, precision=chosen, opset=opset, nodes={**plan.nodes, **ids})
