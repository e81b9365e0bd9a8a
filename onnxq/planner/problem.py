"""The placement problem: a graph as a target sees it, the requests for its tensors, and the target's refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnxq.config import Config
from onnxq.errors import OnnxqError
from onnxq.graph import Graph, NodeRef
from onnxq.planner.existing import NOTHING, Existing
from onnxq.planner.operators import QuantizableOp, QuantizableOps, find_quantizable_ops, list_roles
from onnxq.planner.requests import Requests
from onnxq.sites import Refusal, Role, Unquantized
from onnxq.spec import QuantSpec
from onnxq.targets import Shapes, Target


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacementProblem:
    """Everything that the choice of operators to quantize depends on.

    refused: operators whose requested specs the target cannot run, and others to leave float, by name.
    """

    config: Config
    engine: Target
    units: QuantizableOps
    requests: Requests
    refused: Mapping[str, Unquantized]


def state_problem(
    graph: Graph,
    requests: Requests,
    engine: Target,
    *,
    shapes: Shapes,
    closed: Callable[[NodeRef], bool] = lambda _: False,
    existing: Existing = NOTHING,
) -> PlacementProblem:
    """The problem of one graph, for the configuration of the requests.

    graph: without the pairs that it came with. shapes: of computed tensors, where they are known. closed: nodes to
    leave alone. existing: those pairs.
    """
    units = find_quantizable_ops(graph, engine, shapes, closed=closed, existing=existing)
    refused = _find_spec_refusals(units, requests, engine)
    return PlacementProblem(config=requests.config, engine=engine, units=units, requests=requests, refused=refused)


def _find_spec_refusals(units: QuantizableOps, requests: Requests, engine: Target) -> dict[str, Refusal]:
    """Operators whose specs the target cannot run, by name."""
    found = ((unit.name, _find_spec_refusal(units, requests, engine, unit)) for unit in units.units)
    return {name: refusal for name, refusal in found if refusal is not None}


def _find_spec_refusal(
    units: QuantizableOps, requests: Requests, engine: Target, unit: QuantizableOp
) -> Refusal | None:
    multiplied: set[bool] = set()
    if unit.name in units.complete:
        return None
    for role, tensor in list_roles(units, unit):
        if role is Role.ACTIVATION and requests.config.mode == "weight-only":
            continue
        pair = units.existing.by_tensor.get(tensor)
        try:
            match = requests.match(role, tensor, (unit.node,))
            spec = requests.make_spec(match, role, unit.node) if pair is None else pair.spec
        except OnnxqError as error:
            return Refusal(unit.name, f"{error.subject}: {error.cause}", error.fix, unit.rule.name, "R103")
        refusal = engine.refuse(spec, role, unit.node)
        refusal = refusal or _refuse_shape(units, engine, unit, spec, role)
        if refusal is not None:
            return replace(refusal, rule=unit.rule.name)
        multiplied.add(spec.is_float)
    if len(multiplied) > 1:
        reason = f"{engine.name} multiplies FP8 by FP8 and integers by integers, nothing else"
        fix = "ask for the same storage for its input and its weight"
        return Refusal(unit.name, reason, fix, unit.rule.name, "R103")
    return None


def _refuse_shape(
    units: QuantizableOps, engine: Target, unit: QuantizableOp, spec: QuantSpec, role: Role
) -> Refusal | None:
    """A weight whose shape the kernel for this spec does not take."""
    row = engine.capability(spec, role, unit.node.op_type)
    shape = None if unit.rule.weight is None else units.candidate(unit.node).shape(unit.rule.weight)
    found = None if row is None or role is not Role.WEIGHT or shape is None else row.shape(shape, spec)
    return None if found is None else Refusal(unit.name, *found, code="R103")
