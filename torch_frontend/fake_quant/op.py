"""torch.ops.onnxq.fake_quantize and its backward: schemas, shapes without data, gradients, vmap, dispatch by device.

Importing this module registers the operators; no kernel is compiled or loaded before the first tensor arrives.

Under vmap a batch of tensors is computed as one larger tensor with more scales.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_frontend.fake_quant.grid import Gradients, Grid, check_call, check_scale
from torch_frontend.fake_quant.kernels import choose_kernels

Dims = Sequence[int | None]


def batch_forward(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """vmap rule of fake_quantize: (y with the batch in front, 0)."""
    x, scale, zero_point = _move_batch_first(info.batch_size, in_dims[:3], args[:3])
    folded = _FoldedBatch(x, Grid(*args[3:]))
    qparams = map(folded.fold_qparams, (scale, zero_point))
    y = torch.ops.onnxq.fake_quantize(folded.fold_batch(x), *qparams, *folded.grid)
    return folded.unfold_batch(y), 0


def batch_backward(
    info: Any, in_dims: Dims, *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """vmap rule of fake_quantize_backward: (dx, dscale, dzero_point) and their batch dimensions.

    Each sample of the batch gets its own dscale and dzero_point; a gradient that is not needed has no batch dimension.
    """
    needed = args[4:7]
    dy, x, scale, zero_point = _move_batch_first(info.batch_size, in_dims[:4], args[:4])
    folded = _FoldedBatch(x, Grid(*args[7:]))
    qparams = map(folded.fold_qparams, (scale, zero_point))
    grads = torch.ops.onnxq.fake_quantize_backward(
        folded.fold_batch(dy), folded.fold_batch(x), *qparams, *needed, *folded.grid
    )
    restore = (
        folded.unfold_batch,
        lambda t: t.reshape(scale.shape),
        lambda t: t.reshape(zero_point.shape),
    )
    out = tuple(put(g) if need else g for put, g, need in zip(restore, grads, needed, strict=True))
    return out, tuple(0 if need else None for need in needed)


def _move_batch_first(size: int, dims: Dims, tensors: Sequence[Tensor]) -> list[Tensor]:
    # A tensor that the batch shares is expanded: the folded call needs its values once per sample.
    return [
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, dims, strict=True)
    ]


class _FoldedBatch:
    """A batch [batch, ...] as one tensor with its own grid.

    The batch becomes channels (per tensor), multiplies them (per channel), or is one more dimension (per block, whose
    scales have x's rank).
    """

    def __init__(self, x: Tensor, grid: Grid) -> None:
        rank = x.dim() - 1
        # The axis counts from the sample; the batch stands in front of it.
        self.axis = None if grid.axis is None else grid.axis % max(rank, 1) + 1
        self.channels = x.shape[:1] if self.axis is None else (x.shape[0], x.shape[self.axis])
        self.blocked = grid.block_size > 0
        # Per tensor and per channel the folded channels stand first.
        self.grid = grid._replace(axis=self.axis if self.blocked else 0)

    def fold_batch(self, x: Tensor) -> Tensor:
        if self.blocked or self.axis is None:
            return x
        return x.movedim(self.axis, 1).flatten(0, 1)

    def unfold_batch(self, y: Tensor) -> Tensor:
        if self.blocked or self.axis is None:
            return y
        return y.unflatten(0, self.channels).movedim(1, self.axis)

    def fold_qparams(self, values: Tensor) -> Tensor:
        return values if self.blocked else values.reshape(-1)


_SHARED = (
    "int qmin, int qmax, int? axis=None, int block_size=0, float grad_scale=1.0, "
    'float zero_point_grad_scale=1.0, str edge="round"'
)
# A fragment, so that other modules may add operators of this namespace.
_LIBRARY = torch.library.Library("onnxq", "FRAGMENT")
# Outputs take the strides of their inputs, so a compiler must run the op on the strides it traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY.define(
    f"fake_quantize(Tensor x, Tensor scale, Tensor zero_point, {_SHARED}) -> Tensor", tags=_TAGS
)
_LIBRARY.define(
    "fake_quantize_backward(Tensor dy, Tensor x, Tensor scale, Tensor zero_point, "
    f"bool need_x, bool need_scale, bool need_zero_point, {_SHARED}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _run_forward(x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any) -> Tensor:
    grid = Grid(*settings)
    check_call(x, scale, zero_point, grid)
    # Empty tensors are settled here, so that no kernel needs a case for them.
    if x.numel() == 0:
        return torch.empty_like(x)
    check_scale(scale)
    return choose_kernels(x).forward(x, scale, zero_point, grid)


def _run_backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    # The schema has three flags in front of the grid: whether x, scale and zero_point need their gradients.
    needed = settings[:3]
    grid = Grid(*settings[3:])
    leaves = (x, scale, zero_point)
    check_call(x, scale, zero_point, grid)
    if x.numel() == 0:
        return tuple(
            torch.zeros_like(t) if need else t.new_empty(0)
            for t, need in zip(leaves, needed, strict=True)
        )
    # The schema has no optional tensors among its results: an empty one stands for None.
    grads = choose_kernels(x).backward(dy, *leaves, grid, needed)
    return tuple(t.new_empty(0) if g is None else g for g, t in zip(grads, leaves, strict=True))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("fake_quantize", _run_forward, _key)
    _LIBRARY.impl("fake_quantize_backward", _run_backward, _key)


@torch.library.register_fake("onnxq::fake_quantize", lib=_LIBRARY)
def _fake_forward(x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any) -> Tensor:
    check_call(x, scale, zero_point, Grid(*settings))
    return torch.empty_like(x)


@torch.library.register_fake("onnxq::fake_quantize_backward", lib=_LIBRARY)
def _fake_backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    check_call(x, scale, zero_point, Grid(*settings[3:]))
    leaves = zip((x, scale, zero_point), settings[:3], strict=True)
    return tuple(torch.empty_like(leaf) if need else leaf.new_empty(0) for leaf, need in leaves)


class _StraightThrough(torch.autograd.Function):
    """The operator with its gradients."""

    # torch.library.register_autograd takes longer per call than the kernel of a small tensor.

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.settings = settings
        # Below autograd, else the call would come back here.
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = torch.ops.onnxq.fake_quantize(x, scale, zero_point, *settings)
        return y

    @staticmethod
    @once_differentiable  # the backward op has no gradient of its own: a second derivative is an error, not zero
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        needed = ctx.needs_input_grad[:3]
        grads = torch.ops.onnxq.fake_quantize_backward(
            dy, *ctx.saved_tensors, *needed, *ctx.settings
        )
        return (
            *(g if need else None for g, need in zip(grads, needed, strict=True)),
            *(None for _ in ctx.settings),
        )


_LIBRARY.impl("fake_quantize", _StraightThrough.apply, "Autograd")
torch.library.register_vmap("onnxq::fake_quantize", batch_forward, lib=_LIBRARY)
torch.library.register_vmap("onnxq::fake_quantize_backward", batch_backward, lib=_LIBRARY)
