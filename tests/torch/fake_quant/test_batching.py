"""vmap of fake_quantize is a loop."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.fake_quant.kit import make_qparams, make_x
from torch_frontend.fake_quant import fake_quantize


@pytest.mark.parametrize(("shape", "axis", "block"), [((), None, 0), ((4,), 0, 0), ((5,), -1, 0), ((4, 3), 1, 2)])
def test_vmap_is_a_loop(shape: tuple[int, ...], axis: int | None, block: int) -> None:
    scale, zero = make_qparams((3, *shape))
    x = make_x(3, 4, 5)

    def call(x: Any, scale: Any, zero: Any) -> Any:
        return fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=axis, block_size=block)

    looped = torch.stack([call(*one) for one in zip(x, scale, zero, strict=True)])
    assert torch.equal(torch.vmap(call)(x, scale, zero), looped)
    shared = torch.stack([call(one, scale[0], zero[0]) for one in x])
    assert torch.equal(torch.vmap(call, in_dims=(0, None, None))(x, scale[0], zero[0]), shared)
    last = torch.vmap(call, in_dims=(2, 0, 0))(x.movedim(0, 2), scale, zero)
    assert torch.equal(last, looped)


@pytest.mark.parametrize(("shape", "axis", "block"), [((), None, 0), ((5,), 1, 0), ((4, 3), 1, 2)])
def test_batched_gradients_are_a_loop(shape: tuple[int, ...], axis: int | None, block: int) -> None:
    x = make_x(4, 5).requires_grad_()
    leaves = [x, *(t.requires_grad_() for t in make_qparams(shape))]
    y = fake_quantize(*leaves, qmin=-8, qmax=7, axis=axis, block_size=block)
    dy = make_x(3, 4, 5)
    batched = torch.autograd.grad(y, leaves, dy, retain_graph=True, is_grads_batched=True)
    for k in range(3):
        for one, other in zip(torch.autograd.grad(y, leaves, dy[k], retain_graph=True), batched, strict=True):
            torch.testing.assert_close(one, other[k])
