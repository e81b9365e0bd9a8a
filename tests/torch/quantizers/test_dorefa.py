"""DoReFa against its paper."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import PerChannel, QParams, QuantSpec
from tests.torch.quantizers.papers import EXACT, rounded, values
from torch_frontend.quantizers import create_quantizer


@pytest.mark.parametrize("bits", [2, 3, 4, 7])
def test_dorefa_weights(bits: int) -> None:
    w, g = values(4, 6, size=2.0), values(4, 6, seed=1)
    made = create_quantizer("dorefa", QuantSpec(bits=bits, granularity=PerChannel(0)), site="s", role=Role.WEIGHT)
    made.observe(w)
    made.calc_qparams()
    made.double()
    made.scale.fill_(1 / (2**bits - 1))
    ours = w.clone().requires_grad_()
    made(ours).backward(g)

    theirs, steps = w.clone().requires_grad_(), 2**bits - 1
    share = theirs.tanh() / (2 * theirs.tanh().abs().max()) + 0.5
    y = 2 * rounded(share * steps) / steps - 1
    y.backward(g)
    torch.testing.assert_close(made(w), y, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    odd = torch.round(made(w) * steps)
    assert bool((odd % 2 == 1).all())  # no zero among the levels
    assert made.spec.bits == bits + 1
    assert torch.equal(made.bake(w), made(w))


def test_dorefa_by_hand() -> None:
    """k = 2: levels -1, -1/3, 1/3, 1; tanh(w) / max|tanh(w)| of -1, 0.5, 0.2 and 0 goes to the nearest of them."""
    made = create_quantizer("dorefa", QuantSpec(bits=2), site="s", role=Role.WEIGHT)
    w = torch.atanh(torch.tensor([-1.0, 0.5, 0.2, 0.7]) * 0.9)
    made.observe(w)
    made.calc_qparams()
    torch.testing.assert_close(made(w), torch.tensor([-1.0, 1 / 3, 1 / 3, 1.0]))
    assert made.qparams().scale == np.float32(1 / 3)
    with pytest.raises(CalibrationError, match=r"always 0\.333"):
        made.load_qparams(QParams(np.float32(0.1), np.int32(0)))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dorefa_activations(bits: int) -> None:
    x, g = values(4, 6), values(4, 6, seed=1)
    made = create_quantizer("dorefa", QuantSpec(bits=bits, signed=False, symmetric=False), site="s")
    made.observe(x.abs())
    made.calc_qparams()
    made.double()
    made.scale.fill_(1 / (2**bits - 1))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made(ours).backward(g)
    y = rounded(theirs.clamp(0, 1) * (2**bits - 1)) / (2**bits - 1)
    y.backward(g)
    torch.testing.assert_close(made(x), y, **EXACT)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
