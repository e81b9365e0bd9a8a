"""Groups of elements that share a scale, as a QuantSpec defines them; the arithmetic is `fake_quant.grid`'s."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from onnxq.spec import PerBlock, PerTensor, QuantSpec
from torch_frontend.fake_quant import grid


def axis_of(spec: QuantSpec) -> int | None:
    """Axis of the channels or blocks; None per tensor."""
    return None if isinstance(spec.granularity, PerTensor) else spec.granularity.axis


def block_size_of(spec: QuantSpec) -> int:
    """Elements in a block; 0 unless per block."""
    # 0, not None: the op's schema takes an int.
    return spec.granularity.size if isinstance(spec.granularity, PerBlock) else 0


def shape_numbers(slots: Iterable[Tensor], spec: QuantSpec) -> list[Tensor]:
    """Scales and zero points of the shape of QParams: [] per tensor, where slots have shape [1]."""
    return [values.reshape(()) if axis_of(spec) is None else values for values in slots]


def spread_values(values: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """One value per group, [] or [channels] or blocked, as a tensor that broadcasts over `shape`."""
    return grid.spread_over(values, shape, axis_of(spec), block_size_of(spec))


def sum_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Sum of each group in float64, of the scales' shape."""
    return grid.sum_groups(x, axis_of(spec), block_size_of(spec))


def count_elements(x: Tensor, spec: QuantSpec) -> Tensor:
    """Number of elements of each group, float64, of the scales' shape."""
    if axis_of(spec) is None:
        return torch.tensor(float(x.numel()), dtype=torch.float64)
    # Counted, not divided: the last block may be shorter than the others.
    return sum_groups(torch.ones(x.shape, dtype=torch.float64), spec)


def gather_shards(values: Tensor) -> Tensor:
    """The whole of a tensor that ranks hold in shards (DTensor), for which all of them must call this; else itself."""
    whole = getattr(values, "full_tensor", None)
    return values if whole is None else whole()


def format_range(values: Tensor) -> str:
    """The value of a tensor with one value, else "lowest…highest"."""
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g}" if values.numel() == 1 or low == high else f"{low:.4g}…{high:.4g}"
