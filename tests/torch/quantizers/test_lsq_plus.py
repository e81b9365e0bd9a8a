"""LSQ+ against its paper: gradients by autograd in float64, first scales, and one update by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq.sites import Role
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.quantizers.papers import BITS, EXACT, factored, quantizer, rounded, values
from torch_frontend.quantizers import PostStep, create_quantizer


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [-0.7, 0.0, -1.3])
def test_lsq_plus_gradients(offset: float, bits: int) -> None:
    spec = QuantSpec(bits=bits, signed=False, symmetric=False)
    x, g = values(4, 6, size=2.0) + 1, values(4, 6, seed=1)
    lsq = quantizer("lsq+", spec, 3.0 / 2**bits, 0, Role.ACTIVATION)
    lsq.offset.data.fill_(offset)
    ours = x.clone().requires_grad_()
    lsq(ours).backward(g)

    theirs = x.clone().requires_grad_()
    s, b = (held.detach().clone().requires_grad_() for held in (lsq.scale, lsq.offset))
    factor = 1 / math.sqrt(6 * spec.qmax)
    scale, free = factored(s, factor), factored(b, factor)
    stored = -rounded(-free / scale) * scale  # the paper's offset, where an integer zero point can say it
    y = rounded(((theirs - stored) / scale).clamp(spec.qmin, spec.qmax)) * scale + stored
    y.backward(g)
    torch.testing.assert_close(lsq(x), y, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    torch.testing.assert_close(lsq.scale.grad, s.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(lsq.offset.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_lsq_plus_update_by_hand() -> None:
    """Levels 0 to 3 at s = 0.5, z = 1: from -0.5 to 1. The value 4 is above, -2 below, 0.3 is 0.6 steps."""
    lsq = quantizer("lsq+", QuantSpec(bits=2, signed=False, symmetric=False), 0.5, 1, Role.ACTIVATION)
    assert float(lsq.offset.detach()) == -0.5
    x = torch.tensor([[4.0, -2.0, 0.3]], dtype=torch.float64)
    assert lsq(x).tolist() == [[1.0, -0.5, 0.5]]
    (lsq(x) * torch.tensor([1.0, 5.0, 7.0])).sum().backward()
    k = 1 / math.sqrt(3 * 3)
    # y = round(clip((x - b) / s)) s + b: below and above the paper's dy/ds is the level 0 or 3, dy/db is 1.
    assert float(lsq.scale.grad) == pytest.approx(k * (1 * 3 + 5 * 0 + 7 * (2 - 1.6)))
    assert float(lsq.offset.grad) == pytest.approx(k * (1 + 5))
    torch.optim.SGD(lsq.parameters(), lr=0.1).step()
    assert float(lsq.offset.detach()) == pytest.approx(-0.5 - 0.1 * k * 6)


def test_lsq_plus_trains_what_it_exports() -> None:
    lsq = quantizer("lsq+", QuantSpec(bits=4, signed=False, symmetric=False), 0.2, 3, Role.ACTIVATION).float()
    optimizer, upkeep = torch.optim.SGD(lsq.parameters(), lr=1.0), PostStep(lsq)
    for seed in range(20):
        optimizer.zero_grad()
        x = values(5, 7, seed=seed).float()
        lsq(x).square().sum().backward()
        optimizer.step()
        upkeep()
        numbers = lsq.qparams()
        levels = np.clip(np.rint(x.numpy() / numbers.scale) + numbers.zero_point, 0, 15)
        exported = (levels - numbers.zero_point).astype(np.float32) * numbers.scale
        assert np.array_equal(lsq(x).detach().numpy(), exported)
    assert float(lsq.offset.detach() / lsq.scale.detach()) != pytest.approx(-3)


def test_lsq_plus_keeps_its_zero_point_among_the_levels() -> None:
    lsq = quantizer("lsq+", QuantSpec(bits=4, signed=False, symmetric=False), 0.25, 3, Role.ACTIVATION).float()
    for offset, zero in ((5.0, 0), (-50.0, 15)):
        lsq.offset.data.fill_(offset)
        assert lsq.qparams().zero_point == zero  # also between step and upkeep
        lsq.keep_legal()
        assert float(lsq.offset.detach()) == -0.25 * zero
    lsq(torch.full((1, 3), 100.0)).sum().backward()
    assert float(lsq.offset.grad) != 0  # the limit is no trap


def test_lsq_plus_starts_as_in_the_paper() -> None:
    w = values(8, 50).float() + 0.2
    weight = create_quantizer("lsq+", QuantSpec(bits=4, granularity=PerChannel(0)), site="s", role=Role.WEIGHT)
    weight.observe(w)
    weight.calc_qparams()
    mean, deviation = w.mean(1), w.std(1, correction=0)
    wanted = torch.maximum((mean - 3 * deviation).abs(), (mean + 3 * deviation).abs()) / 8
    torch.testing.assert_close(weight.scale.detach(), wanted)
    assert list(weight.state_dict()) == ["scale"]

    x = torch.cat([values(1, 2000, size=0.3) - 0.2, torch.tensor([[9.0]])], 1).float()
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    errors = {}
    for init in ("paper", "observer"):
        made = create_quantizer("lsq+", spec, site="s", options={"init": init})
        made.observe(x)
        made.calc_qparams()
        errors[init] = float((made(x) - x).square().mean().detach())
    assert errors["paper"] < 0.7 * errors["observer"]
