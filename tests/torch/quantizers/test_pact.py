"""PACT against its paper: gradients by autograd in float64, the start, and one update by hand."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import QuantSpec
from tests.torch.quantizers.papers import BITS, EXACT, quantizer, values
from torch_frontend.quantizers import PostStep, create_quantizer, penalty


@pytest.mark.parametrize("bits", BITS)
def test_pact_gradients(bits: int) -> None:
    spec = QuantSpec(bits=bits, signed=False, symmetric=False)
    x, g = values(4, 6, size=3.0), values(4, 6, seed=1)
    pact = quantizer("pact", spec, 2.5 / spec.qmax, role=Role.ACTIVATION)
    ours = x.clone().requires_grad_()
    pact(ours).backward(g)

    theirs, a = x.clone().requires_grad_(), pact.alpha.detach().clone().requires_grad_()
    clipped = 0.5 * (theirs.abs() - (theirs - a).abs() + a)  # the paper's equation 1
    levels = (clipped * spec.qmax / a).round() * a / spec.qmax
    y = clipped + (levels - clipped).detach()
    y.backward(g)
    torch.testing.assert_close(pact(x), y, **EXACT)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    torch.testing.assert_close(pact.alpha.grad, a.grad, **EXACT)


def test_pact_update_by_hand() -> None:
    """alpha = 3 with integers 0, 1, 2, 3: only values at or above 3 move it, and the penalty pulls it down."""
    pact = quantizer(
        "pact", QuantSpec(bits=2, signed=False, symmetric=False), 1.0, role=Role.ACTIVATION, options={"l2": 0.01}
    )
    x = torch.tensor([[-1.0, 0.4, 1.6, 3.0, 8.0]], dtype=torch.float64, requires_grad=True)
    y = pact(x)
    assert y.tolist() == [[0.0, 0.0, 2.0, 3.0, 3.0]]
    ((y * torch.tensor([1.0, 1.0, 1.0, 2.0, 5.0])).sum() + penalty(pact)).backward()
    assert x.grad.tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0]]
    assert float(pact.alpha.grad) == pytest.approx(2 + 5 + 2 * 0.01 * 3)
    torch.optim.SGD(pact.parameters(), lr=1.0).step()
    PostStep(pact)()
    assert 0 < float(pact.alpha.detach()) < 1e-3  # 3 - 7.06 would be negative
    assert np.all(pact.qparams().scale > 0)
    pact.freeze()
    assert penalty(pact) == 0.0


def test_pact_starts_at_its_alpha_or_at_the_range() -> None:
    x = values(5, 7).float().abs()
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    for init, alpha in (("paper", 10.0), ("observer", float(x.max()))):
        pact = create_quantizer("pact", spec, site="s", options={"init": init})
        pact.observe(x)
        pact.calc_qparams()
        assert float(pact.alpha.detach()) == pytest.approx(alpha, rel=1e-6)
    both = create_quantizer("pact", spec, site="s", options={"init": "observer"})
    both.observe(values(5, 7).float())
    both.calc_qparams()
    low, high = (float(end.detach()) for end in both.dequantized_range())
    assert low < 0 < high
    assert high == pytest.approx(float(both.alpha.detach()))
    y = both(torch.tensor([[-100.0, float("nan"), 100.0]]))
    assert y[0, 0].item() == pytest.approx(low)
    assert y[0, 1].isnan()
    below = create_quantizer("pact", spec, site="relu.out", options={"init": "observer"})
    below.observe(-x)
    with pytest.raises(CalibrationError, match=r"relu\.out: no value above zero"):
        below.calc_qparams()


@pytest.mark.parametrize(
    ("spec", "zero"), [(QuantSpec(bits=4), 0), (QuantSpec(bits=4, signed=False, symmetric=False), 5)]
)
def test_of_signed_tensors_the_lower_end_follows_alpha(spec: QuantSpec, zero: int) -> None:
    """The paper has outputs of ReLU only; values below the lower end give alpha the share by which that end follows."""
    x, g = values(4, 6, size=3.0), values(4, 6, seed=1)
    pact = quantizer("pact", spec, 1.5 / (spec.qmax - zero), zero, role=Role.ACTIVATION)
    ours = x.clone().requires_grad_()
    pact(ours).backward(g)

    theirs, a = x.clone().requires_grad_(), pact.alpha.detach().clone().requires_grad_()
    low = a * (spec.qmin - zero) / (spec.qmax - zero)
    clipped = torch.minimum(torch.maximum(theirs, low), a)
    step = (a / (spec.qmax - zero)).detach()
    y = clipped + ((clipped / step).round() * step - clipped).detach()
    y.backward(g)
    assert bool((x < low).any())
    torch.testing.assert_close(pact(x), y, **EXACT)
    torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    torch.testing.assert_close(pact.alpha.grad, a.grad, **EXACT)
