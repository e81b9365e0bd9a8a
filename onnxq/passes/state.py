"""The state that passes hand on: a float model and the plan made for it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from onnxq.graph import GraphIndex, Model, ModelLike, get_index
from onnxq.graph.precision.widen import SourceTypes
from onnxq.passes.journal import Promotion
from onnxq.plan import Plan, Rotation, Scaling
from onnxq.planner import OnnxPlacement
from onnxq.runtime import Rest


@dataclass(frozen=True, eq=False)
class State:
    """A float model and the plan made for it, as the passes so far leave them.

    named: the model as loaded, every node named, and in float32 where it computes in a narrower type; its declarations
    come back in the quantized model. types: the narrow types it had. model: the float model as rewritten and equalized.
    rewrites: names of the passes that changed it, in order.
    plan: None before planning. plain: the same choice without attention, where attention is to be tried. problem: the
    placement problem that the plan answers. unrounded: the plan that weight rounding began with; rounded: the operators
    it treated. scalings: the record by which the plan equalizes the model again.
    rest: the part of the file that ONNX Runtime cannot run; `named` and `model` are the part in front of it.
    """

    named: ModelLike
    model: ModelLike
    source: Model | None = None
    types: SourceTypes = field(default_factory=SourceTypes)
    rewrites: tuple[str, ...] = ()
    plan: Plan | None = None
    plain: Plan | None = None
    problem: OnnxPlacement | None = None
    unrounded: Plan | None = None
    rounded: frozenset[str] = frozenset()
    scalings: tuple[Scaling | Rotation, ...] = ()
    promotion: Promotion | None = None
    rest: Rest | None = None

    @cached_property
    def before(self) -> GraphIndex:
        """The index of the model as loaded."""
        return get_index(self.named)

    @property
    def planned(self) -> Plan:
        """The plan, in stages that have one."""
        assert self.plan is not None
        return self.plan
