"""Scalings and shifts of channels written into a model, and repeated from the records of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, ModelLike, compute_structural_ids, get_index, infer_shapes
from onnxq.passes.equalization.bias_absorption import write_shifts
from onnxq.passes.equalization.cross_layer import write_scales
from onnxq.passes.equalization.smoothquant import write_smoothing
from onnxq.passes.state import State
from onnxq.plan import Scaling
from onnxq.sites import TensorId

Factors = Mapping[TensorId, NDArray[np.float32]]
CROSS_LAYER, ABSORPTION, SMOOTHQUANT = "cross_layer_equalization", "bias_absorption", "smoothquant"
# In the order in which they are found and repeated.
_WRITERS: dict[str, Callable[[ModelLike, Factors], ModelLike]] = {
    CROSS_LAYER: lambda proto, factors: write_scales(proto, factors)[0],
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


def replay_scalings(state: State, scalings: Sequence[Scaling]) -> State:
    """Repeat the scalings of a plan, on its model or on the same network exported again.

    Raises PlanError for a tensor that is not there, or that cannot take the factors.
    """
    if not scalings:
        return state
    index, ids = get_index(state.model), compute_structural_ids(state.model)
    by_id: dict[str, list[TensorId]] = {}
    for tensor, anchor in ids.items():
        by_id.setdefault(anchor, []).append(tensor)
    for strange in (one.name for one in scalings if one.name not in _WRITERS):
        fix = f"use one of {', '.join(_WRITERS)}"
        raise PlanError(f"scalings: {strange}", "there is no such pass", fix, code="Q403")
    for name in _WRITERS:
        factors = {_find_tensor(one, index, ids, by_id): one.factors for one in scalings if one.name == name}
        if factors:
            state = replace(state, model=_write(state.model, name, factors))
    return state


def _find_tensor(
    one: Scaling, index: GraphIndex, ids: Mapping[TensorId, str], by_id: Mapping[str, Sequence[TensorId]]
) -> TensorId:
    there = index.resolve(one.tensor.name, one.tensor.scope) == one.tensor
    if there and one.anchor in ("", ids.get(one.tensor, "")):
        return one.tensor
    alike = by_id.get(one.anchor, ())
    if len(alike) != 1:
        raise PlanError(
            str(one.tensor), "is scaled by the plan but not in this model", "plan the model again", code="Q404"
        )
    return alike[0]
