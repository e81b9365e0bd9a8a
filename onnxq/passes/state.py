"""The states that passes hand on: a float model, the plan made for it, the placement problem that the plan answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from onnxq.arrays import InputShapes
from onnxq.graph import GraphIndex, Model, ModelLike, SourceTypes, get_index
from onnxq.passes.journal import PassReport
from onnxq.plan import Plan
from onnxq.planner import OnnxPlacement
from onnxq.runtime import Rest
from onnxq.sites import Names
from onnxq.wording import list_fields

T = TypeVar("T")
StateT = TypeVar("StateT", bound="FloatState")


def extend(kind: type[T], base: Any, /, **more: Any) -> T:
    """An object of a dataclass, with the fields of an object of one of its base classes, and more of them."""
    return kind(**{**list_fields(base), **more})


@dataclass(frozen=True, eq=False)
class FloatState:
    """A float model, as the passes so far leave it.

    source: the file as loaded. named: its model, every node named, and in float32 where it computes in a narrower type;
    its declarations come back in the quantized model. model: `named` as rewritten and equalized. types: the narrow
    types it had. rewrites: names of the passes that changed it, in order. rest: the part of the file that ONNX Runtime
    cannot run; `named` and `model` are the part in front of it. sizes: shapes that inputs were given. notes: results
    that passes leave for later ones, each under a name of its own; see `Note`.
    """

    source: Model
    named: ModelLike
    model: ModelLike
    types: SourceTypes = field(default_factory=SourceTypes)
    rewrites: Names = ()
    rest: Rest | None = None
    sizes: InputShapes = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def before(self) -> GraphIndex:
        """The index of the model as loaded."""
        return get_index(self.named)

    @property
    def index(self) -> GraphIndex:
        """The index of the model as it is now."""
        return get_index(self.model)

    def add_plan(self, plan: Plan) -> PlannedState:
        """The state with a plan for its model."""
        return extend(PlannedState, self, plan=plan)

    def add_placement(self, problem: OnnxPlacement, plan: Plan) -> PlacedState:
        """The state with a placement problem and the plan that answers it."""
        return extend(PlacedState, self, plan=plan, problem=problem)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedState(FloatState):
    """A float model and a plan for it, wherever the plan comes from."""

    plan: Plan


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedState(PlannedState):
    """A float model and a plan that the planner made. problem: the placement problem that the plan answers."""

    problem: OnnxPlacement


# The results of passes.
FloatStep = tuple[FloatState, PassReport]
PlacedStep = tuple[PlacedState, PassReport]


@dataclass(frozen=True)
class Note(Generic[T]):
    """The type and the name of a result that a pass leaves in the state for later ones."""

    name: str

    def is_left(self, state: FloatState) -> bool:
        """True where a pass has left the result."""
        return self.name in state.notes

    def find(self, state: FloatState) -> T | None:
        """The result; None where there is none."""
        return cast("T | None", state.notes.get(self.name))

    def read(self, state: FloatState) -> T:
        """The result. Raises KeyError where the pass has left none, which `applies` must rule out."""
        return cast(T, state.notes[self.name])

    def write(self, state: StateT, value: T) -> StateT:
        """The state with this result, in place of an earlier one."""
        return replace(state, notes={**state.notes, self.name: value})

    def erase(self, state: StateT) -> StateT:
        """The state without the result."""
        return replace(
            state, notes={name: value for name, value in state.notes.items() if name != self.name}
        )
