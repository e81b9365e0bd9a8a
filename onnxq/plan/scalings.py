"""Numbers per channel that the float model was rewritten with before planning: data chose them, so plans keep them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.sites import TensorId

# The pass whose numbers are taken off, not multiplied with.
_ADDED = "bias_absorption"


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What a pass did to the channels of one tensor.

    name: the pass. "cross_layer_equalization": the tensor is multiplied by the factors in what makes it, and divided
        by them in its readers.
        "smoothquant": it is divided on the way to the layers that read it, whose weights are multiplied.
        "bias_absorption": it is lowered by them in what makes it, and the biases of its readers make up for that.
    factors: float32 [channels]. anchor: the tensor's structural id in the prepared model before any such rewrite.
    """

    name: str
    tensor: TensorId
    factors: NDArray[np.float32] = field(hash=False)
    anchor: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scaling):
            return NotImplemented
        same = (self.name, self.tensor, self.anchor) == (other.name, other.tensor, other.anchor)
        return same and np.array_equal(self.factors, other.factors)


def scaling_dict(scaling: Scaling, factors: Any) -> dict[str, Any]:
    """Plain JSON values; factors: the array as the plan's codec writes arrays."""
    out = {"pass": scaling.name, "tensor": scaling.tensor.name, "scope": scaling.tensor.scope, "anchor": scaling.anchor}
    return {key: value for key, value in out.items() if value} | {"factors": factors}


def check_scaling(scaling: Scaling) -> Scaling:
    """The scaling itself; ValueError for factors that no pass makes."""
    factors, added = scaling.factors, scaling.name == _ADDED
    if factors.ndim != 1 or not np.isfinite(factors).all() or not (added or (factors > 0).all()):
        above = "" if added else " above 0"
        raise ValueError(f"the factors of {scaling.tensor} must be a row of finite numbers{above}")
    return scaling
