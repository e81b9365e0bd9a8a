"""The placement problem: a graph as a target sees it, the requests for its tensors, and the target's refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.backends import Shapes, Target
from onnxq.config import Config, TensorConfig
from onnxq.errors import ConfigError, OnnxqError
from onnxq.graph import Graph, NodeRef
from onnxq.planner.existing import NOTHING, Existing
from onnxq.planner.operators import QuantizableOp, QuantizableOps, find_quantizable_ops
from onnxq.planner.requests import Requests
from onnxq.sites import Refusal, Role, Unquantized
from onnxq.spec import QuantSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacementProblem:
    """Everything that the choice of operators to quantize depends on.

    refused: operators whose requested specs the target cannot run, and others to leave float, by name.
    """

    config: Config
    engine: Target
    ops: QuantizableOps
    requests: Requests
    refused: Mapping[str, Unquantized]

    @cached_property
    def apart(self) -> frozenset[str]:
        """Names of operators on scales of each run beside others whose scales stand in the file."""
        own = () if self.engine.dynamic else (op for op in self.ops if is_dynamic(self.requests, op))
        return frozenset(op.name for op in own)


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
    ops = find_quantizable_ops(graph, engine, shapes, closed=closed, existing=existing)
    found = {op.name: _find_spec_refusal(ops, requests, engine, op) for op in ops}
    refused = {name: refusal for name, refusal in found.items() if refusal is not None}
    return PlacementProblem(config=requests.config, engine=engine, ops=ops, requests=requests, refused=refused)


def _find_spec_refusal(ops: QuantizableOps, requests: Requests, engine: Target, op: QuantizableOp) -> Refusal | None:
    """The refusal of an operator whose specs the target cannot run; None where it can."""
    # Nothing is asked of pairs that the model came with: they stay as they are.
    if op.name in ops.complete:
        return None
    refusal = _refuse_scale(requests, engine, op)
    if refusal is not None:
        return refusal
    multiplied: set[bool] = set()
    for role, tensor in ops.list_roles(op):
        if role is Role.ACTIVATION and requests.config.mode == "weight-only":
            continue
        pair = ops.existing.by_tensor.get(tensor)
        try:
            match = requests.match(role, tensor, (op.node,))
            spec = requests.make_spec(match, role, op.node) if pair is None else pair.spec
        except OnnxqError as error:
            return Refusal(op.name, f"{error.subject}: {error.cause}", error.fix, op.rule.name, "R103")
        refusal = engine.refuse(spec, role, op.node)
        refusal = refusal or _refuse_shape(ops, engine, op, spec, role)
        if refusal is not None:
            return replace(refusal, rule=op.rule.name)
        multiplied.add(spec.is_float)
    if len(multiplied) > 1:
        reason = f"{engine.name} multiplies FP8 by FP8 and integers by integers, nothing else"
        fix = "ask for the same storage for its input and its weight"
        return Refusal(op.name, reason, fix, op.rule.name, "R103")
    return None


def is_dynamic(requests: Requests, op: QuantizableOp) -> bool:
    """True for an operator whose data are to be quantized on scales of each run."""
    return any(requests.match(Role.ACTIVATION, tensor, (op.node,)).request.dynamic for _, tensor in op.data)


def _refuse_scale(requests: Requests, engine: Target, op: QuantizableOp) -> Refusal | None:
    """The refusal of an operator whose kernel computes the scale of its data, where another is asked for."""
    if requests.config.mode == "weight-only" or not op.rule.dynamic:
        return None
    asked = (requests.match(Role.ACTIVATION, tensor, (op.node,)).request for _, tensor in op.data)
    if all(_can_be_dynamic(request) for request in asked):
        return None
    kind = f"{engine.name} runs {op.node.op_type} in integers"
    reason = f"{kind} only on scales of each run: 8-bit asymmetric uint8, one a tensor"
    fix = "leave `dynamic`, bits, scheme, signed and granularity of its activations as they are in ort-int8"
    return Refusal(op.name, reason, fix, op.rule.name, "R101")


def _can_be_dynamic(request: TensorConfig) -> bool:
    try:
        return request.spec(None).dynamic
    except ConfigError:
        return False


def _refuse_shape(
    ops: QuantizableOps, engine: Target, op: QuantizableOp, spec: QuantSpec, role: Role
) -> Refusal | None:
    """A weight whose shape the kernel for this spec does not take."""
    row = engine.capability(spec, role, op.node.op_type)
    shape = None if op.rule.weight is None else ops.candidate(op.node).shape(op.rule.weight)
    found = None if row is None or role is not Role.WEIGHT or shape is None else row.shape(shape, spec)
    return None if found is None else Refusal(op.name, *found, code="R103")
