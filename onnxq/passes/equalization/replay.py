"""Scalings, shifts and rotations of channels written into a model, and repeated from the records of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxq.errors import PlanError
from onnxq.graph import ModelLike, get_index, infer_shapes
from onnxq.passes.equalization.bias_absorption import write_shifts
from onnxq.passes.equalization.cross_layer import Factors, write_scales
from onnxq.passes.equalization.rotation import write_rotations
from onnxq.passes.equalization.smoothquant import write_smoothing
from onnxq.passes.state import State
from onnxq.plan import Rotation, Scaling
from onnxq.planner.recognize import Recognized
from onnxq.planner.rewritten import Anchors
from onnxq.sites import TensorId

CROSS_LAYER, ABSORPTION, SMOOTHQUANT = "cross_layer_equalization", "bias_absorption", "smoothquant"
ROTATION = "rotation"
# In the order in which they are found and repeated.
_WRITERS: dict[str, Callable[[ModelLike, Factors], ModelLike]] = {
    CROSS_LAYER: write_scales,
    ABSORPTION: write_shifts,
    SMOOTHQUANT: write_smoothing,
}


def write_factors(ids: Mapping[TensorId, str], state: State, name: str, factors: Factors) -> State:
    """The state with the factors in its model's weights, and with the record of them for the plan.

    ids: structural identities in the model that the plan will be applied to, before any scaling.
    """
    found = tuple(
        Scaling(name=name, tensor=tensor, factors=np.asarray(s, np.float32), anchor=ids.get(tensor, ""))
        for tensor, s in factors.items()
    )
    return replace(state, model=_write(state.model, name, factors), scalings=(*state.scalings, *found))


def _write(proto: ModelLike, name: str, factors: Factors) -> ModelLike:
    single = {tensor: np.asarray(s, np.float32) for tensor, s in factors.items()}
    return infer_shapes(_WRITERS[name](proto, single))


def rotate_state(
    ids: Mapping[TensorId, str], state: State, rotations: Sequence[Rotation]
) -> tuple[State, tuple[str, ...]]:
    """The state with the rotations in its model's weights and in the record for the plan, and the matrices copied.

    ids: as in `write_factors`.
    """
    model, copied = write_rotations(state.model, rotations)
    noted = tuple(replace(one, anchor=ids.get(one.tensor, "")) for one in rotations)
    return replace(state, model=infer_shapes(model), scalings=(*state.scalings, *noted)), copied


def replay_scalings(
    state: State, scalings: Sequence[Scaling | Rotation], recognized: Recognized | None = None
) -> State:
    """Repeat the scalings of a plan, on its model or on the same network exported again.

    recognized: the plan's tensors in a graph that other tools rewrote.
    Raises PlanError for a tensor that is not there, or that cannot take the factors.
    """
    if not scalings:
        return state
    for strange in (one.name for one in scalings if isinstance(one, Scaling) and one.name not in _WRITERS):
        fix = f"use one of {', '.join((ROTATION, *_WRITERS))}"
        raise PlanError(f"scalings: {strange}", "there is no such pass", fix, code="Q403")
    # All of them on the model before any scaling, which is what their anchors are of.
    anchors = Anchors(get_index(state.model), {}, lasting=False, recognized=recognized)
    turned = [replace(one, tensor=_find_tensor(one, anchors)) for one in scalings if isinstance(one, Rotation)]
    if turned:
        state = replace(state, model=infer_shapes(write_rotations(state.model, turned)[0]))
    factored = [one for one in scalings if isinstance(one, Scaling)]
    for name in _WRITERS:
        factors = {_find_tensor(one, anchors): one.factors for one in factored if one.name == name}
        if factors:
            state = replace(state, model=_write(state.model, name, factors))
    return state


def _find_tensor(one: Scaling | Rotation, anchors: Anchors) -> TensorId:
    found = anchors.find_tensor(one.tensor, one.anchor)
    if found is None:
        cause = "is scaled by the plan but not in this model"
        raise PlanError(str(one.tensor), cause, "plan the model again", code="Q404")
    return found
