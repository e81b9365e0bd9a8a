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
from onnxq.passes.state import FloatState, Note
from onnxq.plan import Rotation, Scaling
from onnxq.planner.recognize import Recognized
from onnxq.planner.rewritten import Anchors
from onnxq.sites import TensorId

CROSS_LAYER, ABSORPTION, SMOOTHQUANT = "cross_layer_equalization", "bias_absorption", "smoothquant"
ROTATION = "rotation"
# The record by which a plan equalizes the model again.
SCALINGS: Note[tuple[Scaling | Rotation, ...]] = Note("equalization")
# In the order in which they are found and repeated.
_WRITERS: dict[str, Callable[[ModelLike, Factors], ModelLike]] = {
    CROSS_LAYER: write_scales,
    ABSORPTION: write_shifts,
    SMOOTHQUANT: write_smoothing,
}


def write_factors(ids: Mapping[TensorId, str], state: FloatState, name: str, factors: Factors) -> FloatState:
    """The state with the factors in its model's weights, and with the record of them for the plan.

    ids: structural identities in the model that the plan will be applied to, before any scaling.
    """
    single = {tensor: np.asarray(s, np.float32) for tensor, s in factors.items()}
    records = (Scaling(name=name, tensor=tensor, factors=s, anchor=ids.get(tensor, "")) for tensor, s in single.items())
    model = infer_shapes(_WRITERS[name](state.model, single))
    return _record(replace(state, model=model), tuple(records))


def _record(state: FloatState, scalings: Sequence[Scaling | Rotation]) -> FloatState:
    return SCALINGS.write(state, (*(SCALINGS.find(state) or ()), *scalings))


def rotate_state(
    ids: Mapping[TensorId, str], state: FloatState, rotations: Sequence[Rotation]
) -> tuple[FloatState, tuple[str, ...]]:
    """The state with the rotations in its model's weights and in the record for the plan, and the matrices copied.

    ids: as in `write_factors`.
    """
    model, copied = write_rotations(state.model, rotations)
    records = (replace(rotation, anchor=ids.get(rotation.tensor, "")) for rotation in rotations)
    return _record(replace(state, model=infer_shapes(model)), tuple(records)), copied


def replay_scalings(
    state: FloatState, scalings: Sequence[Scaling | Rotation], recognized: Recognized | None = None
) -> FloatState:
    """Repeat the scalings of a plan, on its model or on the same network exported again.

    recognized: the plan's tensors in a graph that other tools rewrote.
    Raises PlanError for a tensor that is not there, or that cannot take the factors.
    """
    if not scalings:
        return state
    for scaling in scalings:
        if isinstance(scaling, Scaling) and scaling.name not in _WRITERS:
            fix = f"use one of {', '.join((ROTATION, *_WRITERS))}"
            raise PlanError(f"scalings: {scaling.name}", "there is no such pass", fix, code="Q403")
    # All of them on the model before any scaling, which is what their anchors are of.
    anchors = Anchors(get_index(state.model), {}, lasting=False, recognized=recognized)
    tensors = {id(scaling): _find_tensor(scaling, anchors) for scaling in scalings}
    rotations = [replace(one, tensor=tensors[id(one)]) for one in scalings if isinstance(one, Rotation)]
    model = infer_shapes(write_rotations(state.model, rotations)[0]) if rotations else state.model
    for name, write in _WRITERS.items():
        factors = {
            tensors[id(scaling)]: scaling.factors
            for scaling in scalings
            if isinstance(scaling, Scaling) and scaling.name == name
        }
        if factors:
            model = infer_shapes(write(model, factors))
    return replace(state, model=model)


def _find_tensor(scaling: Scaling | Rotation, anchors: Anchors) -> TensorId:
    tensor = anchors.find_tensor(scaling.tensor, scaling.anchor)
    if tensor is None:
        cause = "is scaled by the plan but not in this model"
        raise PlanError(str(scaling.tensor), cause, "plan the model again", code="Q404")
    return tensor
