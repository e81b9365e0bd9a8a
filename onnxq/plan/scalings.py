"""Factors per channel, and rotations of channels, that passes rewrote the float model with before planning.

Data chose them, so a plan keeps them: the same network exported again is rewritten in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.config import Frozen
from onnxq.config.rows import Form
from onnxq.config.schema import Natural, PassName
from onnxq.plan.arrays import read_floats, write_array
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


def check_scaling(scaling: Scaling) -> Scaling:
    """The scaling itself. Raises ValueError for factors that no pass computes."""
    factors, added = scaling.factors, scaling.name == _ADDED
    if factors.ndim != 1 or not np.isfinite(factors).all() or not (added or (factors > 0).all()):
        above = "" if added else " above 0"
        raise ValueError(f"the factors of {scaling.tensor} must be a row of finite numbers{above}")
    return scaling


class _ScalingRow(Frozen):
    """A Scaling, under `pass` the name of the pass that made it, or a Rotation, which has a size."""

    name: PassName
    tensor: str
    scope: str = ""
    anchor: str = ""
    factors: Any = None
    seed: Natural = 0
    size: Natural | None = None


def _read_scaling(row: _ScalingRow) -> Scaling | Rotation:
    tensor = TensorId(row.tensor, row.scope)
    if row.size is not None:
        return Rotation(tensor=tensor, seed=row.seed, size=row.size, anchor=row.anchor)
    factors = read_floats(row.factors)
    return check_scaling(Scaling(name=row.name, tensor=tensor, factors=factors, anchor=row.anchor))


def _write_scaling(scaling: Scaling | Rotation) -> dict[str, Any]:
    tensor = {"tensor": scaling.tensor.name, "scope": scaling.tensor.scope, "anchor": scaling.anchor}
    names = {"pass": scaling.name, **{key: text for key, text in tensor.items() if text}}
    if isinstance(scaling, Rotation):
        return names | {"seed": scaling.seed, "size": scaling.size}
    return names | {"factors": write_array(scaling.factors)}


SCALING = Form(_ScalingRow, _read_scaling, _write_scaling)
