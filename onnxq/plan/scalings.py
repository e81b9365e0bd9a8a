"""Factors per channel, and rotations of channels, that passes rewrote the float model with before planning.

Data chose them, so a plan keeps them: the same network exported again is rewritten in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.sites import TensorId

# The pass whose factors are subtracted; those of the others multiply, and so must be positive.
_ADDED = "bias_absorption"


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The factors of one pass for the channels of one tensor.

    name: the pass. "cross_layer_equalization": the node that makes the tensor multiplies it by the factors, and divided
        by them in its readers.
        "smoothquant": it is divided in front of the layers that read it, whose weights are multiplied.
        "bias_absorption": the node that makes the tensor subtracts them, the biases of its readers add their effect.
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


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A rotation of channels: they are multiplied by an orthogonal matrix, which a seed stands for.

    tensor: the first of those that lie in the same channels. size: of the matrix; a tensor of more channels is rotated
        part by part. anchor: as of a Scaling.
    """

    tensor: TensorId
    seed: int
    size: int
    anchor: str = ""
    name: str = "rotation"


def scaling_dict(scaling: Scaling | Rotation, numbers: dict[str, Any]) -> dict[str, Any]:
    """The scaling as JSON values, the last of them its numbers as they are written."""
    out = {"pass": scaling.name, "tensor": scaling.tensor.name, "scope": scaling.tensor.scope, "anchor": scaling.anchor}
    return {key: value for key, value in out.items() if value} | numbers


def check_scaling(scaling: Scaling) -> Scaling:
    """The scaling itself. Raises ValueError for factors that no pass computes."""
    factors, added = scaling.factors, scaling.name == _ADDED
    if factors.ndim != 1 or not np.isfinite(factors).all() or not (added or (factors > 0).all()):
        above = "" if added else " above 0"
        raise ValueError(f"the factors of {scaling.tensor} must be a row of finite numbers{above}")
    return scaling
