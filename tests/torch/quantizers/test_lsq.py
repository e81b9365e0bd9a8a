"""LSQ against its paper: gradients by autograd in float64, first scales, and one update by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor, QuantSpec
from tests.torch.quantizers.papers import BITS, EXACT, along, factored, quantizer, rounded, values
from torch_frontend.quantizers import create_quantizer


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("role", "grain", "shape"),
    [
        (Role.WEIGHT, PerTensor(), ()),
        (Role.WEIGHT, PerChannel(1), (6,)),
        (Role.WEIGHT, PerBlock(1, 4), (4, 2)),
        (Role.ACTIVATION, PerTensor(), ()),
        (Role.ACTIVATION, PerChannel(1), (6,)),
    ],
    ids=str,
)
def test_lsq_gradients(role: Role, grain: object, shape: tuple[int, ...], bits: int) -> None:
    spec = QuantSpec(bits=bits, granularity=grain)
    x, g = values(4, 6, size=3.0), values(4, 6, seed=1)
    scale = (values(*shape, seed=2).abs() + 0.3) * 4 / 2**bits
    lsq = quantizer("lsq", spec, scale.numpy(), role=role)
    ours = x.clone().requires_grad_()
    lsq(ours).backward(g)

    theirs, s = x.clone().requires_grad_(), lsq.scale.detach().clone().requires_grad_()
    together = x.numel() if role is Role.WEIGHT else x[0].numel()
    wide = along(factored(s, 1 / math.sqrt(together / scale.numel() * spec.qmax)), spec, x)
    y = rounded((theirs / wide).clamp(spec.qmin, spec.qmax)) * wide
    y.backward(g)
    torch.testing.assert_close(lsq(x), y, **EXACT)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    torch.testing.assert_close(lsq.scale.grad, s.grad, **EXACT)


def test_lsq_clips_before_it_rounds() -> None:
    """7.3 steps round to 7, the highest level, yet lie outside: no gradient to x, all of it to the scale."""
    lsq = quantizer("lsq", QuantSpec(bits=4), 1.0)
    x = torch.tensor([7.3, 6.8, -8.4], dtype=torch.float64, requires_grad=True)
    lsq(x).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 0.0]
    assert float(lsq.scale.grad) == pytest.approx((7 + (7 - 6.8) - 8) / math.sqrt(3 * 7))


def test_lsq_update_by_hand() -> None:
    """Two weights of three inside, unsigned data, learning rate 0.1."""
    lsq = quantizer("lsq", QuantSpec(bits=2, signed=False, symmetric=False), 0.5, role=Role.ACTIVATION)
    x = torch.tensor([[0.3, 0.9, 5.0], [0.3, 0.9, 5.0]], dtype=torch.float64)  # 0.6, 1.8, 10 steps; levels 0 to 3
    loss = (lsq(x) * torch.tensor([1.0, 2.0, 3.0])).sum()
    torch.optim.SGD(lsq.parameters(), lr=0.1).zero_grad()
    loss.backward()
    torch.optim.SGD(lsq.parameters(), lr=0.1).step()
    gradient = 2 * (1.0 * (1 - 0.6) + 2.0 * (2 - 1.8) + 3.0 * 3) / math.sqrt(3 * 3)  # N = 3 features, not 6 values
    assert float(lsq.scale.detach()) == pytest.approx(0.5 - 0.1 * gradient, rel=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_starts_as_in_the_paper(bits: int) -> None:
    w = values(8, 5).float()
    weight = create_quantizer("lsq", QuantSpec(bits=bits, granularity=PerChannel(0)), site="s", role=Role.WEIGHT)
    weight.observe(w)
    weight.calc_qparams()
    wanted = 2 * w.abs().mean(1) / math.sqrt(2 ** (bits - 1) - 1)
    torch.testing.assert_close(weight.scale.detach(), wanted)

    unsigned = QuantSpec(bits=bits, signed=False, symmetric=False)
    relu = create_quantizer("lsq", unsigned, site="s")
    for batch in w.abs().split(3):
        relu.observe(batch)
    relu.calc_qparams()
    torch.testing.assert_close(relu.scale.detach(), 2 * w.abs().mean().reshape(1) / math.sqrt(2**bits - 1))
    assert float(relu.zero_point) == 0

    both = create_quantizer("lsq", unsigned, site="s")
    both.observe(w)
    both.calc_qparams()
    assert 0 < float(both.zero_point) < 2**bits - 1
    blocks = create_quantizer("lsq", QuantSpec(bits=bits, granularity=PerBlock(1, 3)), site="s", role=Role.WEIGHT)
    blocks.observe(w)
    blocks.calc_qparams()
    last = 2 * w[:, 3:].abs().mean(1) / math.sqrt(2 ** (bits - 1) - 1)  # a ragged block is the mean of what is there
    torch.testing.assert_close(blocks.scale.detach()[:, 1], last)


def test_lsq_may_start_from_an_observer() -> None:
    w = values(8, 5).float()
    how = {"site": "s", "role": Role.WEIGHT, "observer": ObserverSpec("mse")}
    learned = create_quantizer("lsq", QuantSpec(), options={"init": "observer"}, **how)
    fixed = create_quantizer("uniform", QuantSpec(), **how)
    for one in (learned, fixed):
        one.observe(w)
        one.calc_qparams()
    assert torch.equal(learned.scale.detach(), fixed.scale)
