"""AdaRound against its paper."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import PerBlock, PerChannel, QuantSpec
from tests.torch.quantizers.papers import EXACT, along, quantizer, values
from torch_frontend.quantizers import AdaRound, Rounding, create_quantizer


@pytest.mark.parametrize(
    ("spec", "scale", "zero"),
    [
        (QuantSpec(bits=4), 0.2, 0),
        (QuantSpec(bits=3, granularity=PerChannel(0)), [0.2, 0.3, 0.4, 0.5], 0),
        (QuantSpec(bits=4, symmetric=False, signed=False, granularity=PerBlock(1, 4)), [[0.2, 0.4]] * 4, 6),
    ],
    ids=["tensor", "channel", "block"],
)
def test_adaround_formulas(spec: QuantSpec, scale: object, zero: int) -> None:
    w, g = values(4, 6), values(4, 6, seed=1)
    made = quantizer("adaround", spec, scale, zero)
    assert isinstance(made, AdaRound)
    assert made.rounding is Rounding.NEAREST
    nearest = made(w)
    v = made.start_learning(w)
    assert made.rounding is Rounding.SOFT
    s = along(made.scale, spec, w)
    low, high = (spec.qmin - zero) * s, (spec.qmax - zero) * s
    torch.testing.assert_close(made(w), w.clamp(low, high), rtol=1e-6, atol=1e-7)  # soft starts at the float weight

    v.data.add_(values(4, 6, seed=3))
    theirs = v.detach().clone().requires_grad_()
    h = (torch.sigmoid(theirs) * 1.2 - 0.1).clamp(0, 1)
    y = s * (torch.floor(w / s) + h + zero).clamp(spec.qmin, spec.qmax) - s * zero
    (y * g).sum().backward()
    (made(w) * g).sum().backward()
    torch.testing.assert_close(made(w), y, **EXACT)
    torch.testing.assert_close(v.grad, theirs.grad, **EXACT)

    for beta in (20.0, 2.0):
        v.grad = theirs.grad = None
        made.regularizer(beta).backward()
        h = (torch.sigmoid(theirs) * 1.2 - 0.1).clamp(0, 1)
        (1 - (2 * h - 1).abs() ** beta).sum().backward()
        torch.testing.assert_close(v.grad, theirs.grad, **EXACT)

    made.stop_learning()
    assert made.rounding is Rounding.HARD
    up = (v.detach() >= 0).double()
    hard = ((torch.floor(w / s) + up + zero).clamp(spec.qmin, spec.qmax) - zero) * s
    assert torch.equal(made(w), hard)
    assert torch.equal(made.bake(w), hard)
    made.forget_rounding()
    assert torch.equal(made(w), nearest)


def test_adaround_hard_is_what_is_exported_and_loads_again() -> None:
    w = values(8, 6).float()
    made = quantizer("adaround", QuantSpec(bits=4, granularity=PerChannel(0)), [0.3] * 8).float()
    made.start_learning(w).data.copy_(values(8, 6, seed=5))
    made.stop_learning()
    plain = create_quantizer("uniform", made.spec, site="s", role=Role.WEIGHT)
    plain.load_qparams(made.qparams())
    assert torch.equal(plain(made.bake(w)), made(w))
    assert not torch.equal(made(w), plain(w))
    twin = create_quantizer("adaround", made.spec, site="s", role=Role.WEIGHT)
    twin.load_state_dict(made.state_dict())
    assert torch.equal(twin(w), made(w))
    learning = w.clone().requires_grad_()
    made(learning).sum().backward()
    assert learning.grad.unique().tolist() == [0.0, 1.0] or bool((learning.grad == 1).all())
    with pytest.raises(CalibrationError, match="learned for"):
        made(w[:, :3])


def test_adaround_update_by_hand() -> None:
    """One weight, 0.3 of a step above a level: v0 = -log(1.2 / 0.4 - 1) = -log 2; dh/dv = 1.2 sigma (1 - sigma)."""
    made = quantizer("adaround", QuantSpec(bits=4), 1.0)
    w = torch.tensor([2.3], dtype=torch.float64)
    v = made.start_learning(w)
    assert float(v.detach()) == pytest.approx(-math.log(2), rel=1e-6)
    made(w).sum().backward()
    torch.optim.SGD([v], lr=1.0).step()
    sigma = 1 / 3
    assert float(v.detach()) == pytest.approx(-math.log(2) - 1.2 * sigma * (1 - sigma), rel=1e-6)
