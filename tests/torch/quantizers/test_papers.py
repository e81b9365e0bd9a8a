"""Quantizers against their papers: gradients by autograd in float64, first numbers, and one update by hand."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor

from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.torch.quantizers import kit
from torch_frontend.quantizers import PostStep, Rounding, create_quantizer, penalty

every_width = pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])


@every_width
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
    spec, x = QuantSpec(bits=bits, granularity=grain), kit.values(4, 6, size=3.0)
    scale = (kit.values(*shape, seed=2).abs() + 0.3) * 4 / 2**bits
    together = x.numel() if role is Role.WEIGHT else x[0].numel()
    factor = 1 / math.sqrt(together / scale.numel() * spec.qmax)

    def formula(x: Tensor, s: Tensor) -> Tensor:
        wide = kit.along(kit.factored(s, factor), spec, x)
        return kit.rounded((x / wide).clamp(spec.qmin, spec.qmax)) * wide

    kit.assert_gradients(kit.quantizer("lsq", spec, scale.numpy(), role=role), x, formula, "scale")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_starts_as_in_the_paper(bits: int) -> None:
    w = kit.values(8, 5).float()
    root = math.sqrt(2 ** (bits - 1) - 1)
    weight = kit.calibrated("lsq", QuantSpec(bits=bits, granularity=PerChannel(0)), w)
    torch.testing.assert_close(weight.scale.detach(), 2 * w.abs().mean(1) / root)
    relu = kit.calibrated("lsq", kit.unsigned(bits), *w.abs().split(3), role=Role.ACTIVATION)
    torch.testing.assert_close(relu.scale.detach(), 2 * w.abs().mean().reshape(1) / math.sqrt(2**bits - 1))
    assert float(relu.zero_point) == 0
    both = kit.calibrated("lsq", kit.unsigned(bits), w, role=Role.ACTIVATION)
    assert 0 < float(both.zero_point) < 2**bits - 1
    blocks = kit.calibrated("lsq", QuantSpec(bits=bits, granularity=PerBlock(1, 3)), w)
    last = 2 * w[:, 3:].abs().mean(1) / root  # a ragged block is the mean of what is there
    torch.testing.assert_close(blocks.scale.detach()[:, 1], last)


def test_lsq_may_start_from_an_observer() -> None:
    w, observer = kit.values(8, 5).float(), ObserverSpec("mse")
    learned = kit.calibrated("lsq", QuantSpec(), w, options={"init": "observer"}, observer=observer)
    fixed = kit.calibrated("uniform", QuantSpec(), w, observer=observer)
    assert torch.equal(learned.scale.detach(), fixed.scale)


@every_width
@pytest.mark.parametrize("offset", [-0.7, 0.0, -1.3])
def test_lsq_plus_gradients(offset: float, bits: int) -> None:
    spec = kit.unsigned(bits)
    lsq = kit.quantizer("lsq+", spec, 3.0 / 2**bits, 0, Role.ACTIVATION)
    lsq.offset.data.fill_(offset)
    factor = 1 / math.sqrt(6 * spec.qmax)

    def formula(x: Tensor, s: Tensor, b: Tensor) -> Tensor:
        scale, free = kit.factored(s, factor), kit.factored(b, factor)
        stored = -kit.rounded(-free / scale) * scale  # the paper's offset, where an integer zero point can say it
        return kit.rounded(((x - stored) / scale).clamp(spec.qmin, spec.qmax)) * scale + stored

    kit.assert_gradients(lsq, kit.values(4, 6, size=2.0) + 1, formula, "scale", "offset", rtol=1e-9, atol=1e-12)


def test_lsq_plus_trains_what_it_exports() -> None:
    lsq = kit.quantizer("lsq+", kit.unsigned(4), 0.2, 3, Role.ACTIVATION).float()
    optimizer, upkeep = torch.optim.SGD(lsq.parameters(), lr=1.0), PostStep(lsq)
    for seed in range(20):
        optimizer.zero_grad()
        x = kit.values(5, 7, seed=seed).float()
        lsq(x).square().sum().backward()
        optimizer.step()
        upkeep()
        numbers = lsq.qparams()
        levels = np.clip(np.rint(x.numpy() / numbers.scale) + numbers.zero_point, 0, 15)
        exported = (levels - numbers.zero_point).astype(np.float32) * numbers.scale
        assert np.array_equal(lsq(x).detach().numpy(), exported)
    assert float(lsq.offset.detach() / lsq.scale.detach()) != pytest.approx(-3)


def test_lsq_plus_keeps_its_zero_point_among_the_levels() -> None:
    lsq = kit.quantizer("lsq+", kit.unsigned(4), 0.25, 3, Role.ACTIVATION).float()
    for offset, zero in ((5.0, 0), (-50.0, 15)):
        lsq.offset.data.fill_(offset)
        assert lsq.qparams().zero_point == zero  # also between step and upkeep
        lsq.keep_legal()
        assert float(lsq.offset.detach()) == -0.25 * zero
    lsq(torch.full((1, 3), 100.0)).sum().backward()
    assert float(lsq.offset.grad) != 0  # the limit is no trap


def test_lsq_plus_starts_as_in_the_paper() -> None:
    w = kit.values(8, 50).float() + 0.2
    weight = kit.calibrated("lsq+", QuantSpec(bits=4, granularity=PerChannel(0)), w)
    mean, deviation = w.mean(1), w.std(1, correction=0)
    wanted = torch.maximum((mean - 3 * deviation).abs(), (mean + 3 * deviation).abs()) / 8
    torch.testing.assert_close(weight.scale.detach(), wanted)
    assert list(weight.state_dict()) == ["scale"]

    x = torch.cat([kit.values(1, 2000, size=0.3) - 0.2, torch.tensor([[9.0]])], 1).float()
    errors = {}
    for init in ("paper", "observer"):
        made = kit.calibrated("lsq+", kit.unsigned(4), x, role=Role.ACTIVATION, options={"init": init})
        errors[init] = float((made(x) - x).square().mean().detach())
    assert errors["paper"] < 0.7 * errors["observer"]


@every_width
def test_pact_gradients(bits: int) -> None:
    spec = kit.unsigned(bits)

    def formula(x: Tensor, a: Tensor) -> Tensor:
        clipped = 0.5 * (x.abs() - (x - a).abs() + a)  # the paper's equation 1
        levels = (clipped * spec.qmax / a).round() * a / spec.qmax
        return clipped + (levels - clipped).detach()

    pact = kit.quantizer("pact", spec, 2.5 / spec.qmax, role=Role.ACTIVATION)
    kit.assert_gradients(pact, kit.values(4, 6, size=3.0), formula, "alpha")


@pytest.mark.parametrize(("spec", "zero"), [(QuantSpec(bits=4), 0), (kit.unsigned(4), 5)])
def test_of_signed_tensors_the_lower_end_follows_alpha(spec: QuantSpec, zero: int) -> None:
    """The paper has outputs of ReLU only; values below the lower end give alpha the share by which that end follows."""
    x, above = kit.values(4, 6, size=3.0), spec.qmax - zero

    def formula(x: Tensor, a: Tensor) -> Tensor:
        low = a * (spec.qmin - zero) / above
        assert bool((x < low).any())
        clipped = torch.minimum(torch.maximum(x, low), a)
        step = (a / above).detach()
        return clipped + ((clipped / step).round() * step - clipped).detach()

    kit.assert_gradients(kit.quantizer("pact", spec, 1.5 / above, zero, role=Role.ACTIVATION), x, formula, "alpha")


def test_pact_update_by_hand() -> None:
    """alpha = 3 with integers 0, 1, 2, 3: only values at or above 3 move it, and the penalty pulls it down."""
    pact = kit.quantizer("pact", kit.unsigned(2), 1.0, role=Role.ACTIVATION, options={"l2": 0.01})
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
    x = kit.values(5, 7).float()
    for init, alpha in (("paper", 10.0), ("observer", float(x.abs().max()))):
        pact = kit.calibrated("pact", kit.unsigned(4), x.abs(), role=Role.ACTIVATION, options={"init": init})
        assert float(pact.alpha.detach()) == pytest.approx(alpha, rel=1e-6)
    both = kit.calibrated("pact", kit.unsigned(4), x, role=Role.ACTIVATION, options={"init": "observer"})
    low, high = (float(end.detach()) for end in both.dequantized_range())
    assert low < 0 < high
    assert high == pytest.approx(float(both.alpha.detach()))
    y = both(torch.tensor([[-100.0, float("nan"), 100.0]]))
    assert y[0, 0].item() == pytest.approx(low)
    assert y[0, 1].isnan()
    with pytest.raises(CalibrationError, match=r"conv\.weight: no value above zero"):
        kit.calibrated("pact", kit.unsigned(4), -x.abs(), role=Role.ACTIVATION, options={"init": "observer"})


@pytest.mark.parametrize("bits", [2, 3, 4, 7])
def test_dorefa_weights(bits: int) -> None:
    w, steps = kit.values(4, 6, size=2.0), 2**bits - 1
    made = kit.calibrated("dorefa", QuantSpec(bits=bits, granularity=PerChannel(0)), w).double()
    made.scale.fill_(1 / steps)

    def formula(w: Tensor) -> Tensor:
        share = w.tanh() / (2 * w.tanh().abs().max()) + 0.5
        return 2 * kit.rounded(share * steps) / steps - 1

    kit.assert_gradients(made, w, formula, rtol=1e-6, atol=1e-7)
    assert bool((torch.round(made(w) * steps) % 2 == 1).all())  # no zero among the levels
    assert made.spec.bits == bits + 1
    assert torch.equal(made.bake(w), made(w))


def test_the_step_of_dorefa_is_fixed() -> None:
    made = kit.calibrated("dorefa", QuantSpec(bits=2), kit.weight())
    assert made.qparams().scale == np.float32(1 / 3)
    with pytest.raises(CalibrationError, match=r"always 0\.333"):
        made.load_qparams(QParams(np.float32(0.1), np.int32(0)))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dorefa_activations(bits: int) -> None:
    x, steps = kit.values(4, 6), 2**bits - 1
    made = kit.calibrated("dorefa", kit.unsigned(bits), x.abs(), role=Role.ACTIVATION).double()
    made.scale.fill_(1 / steps)
    kit.assert_gradients(made, x, lambda x: kit.rounded(x.clamp(0, 1) * steps) / steps)


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
    w, g = kit.values(4, 6), kit.values(4, 6, seed=1)
    made = kit.quantizer("adaround", spec, scale, zero)
    assert made.rounding is Rounding.NEAREST
    nearest = made(w)
    v = made.start_learning(w)
    assert made.rounding is Rounding.SOFT
    s = kit.along(made.scale, spec, w)
    low, high = (spec.qmin - zero) * s, (spec.qmax - zero) * s
    torch.testing.assert_close(made(w), w.clamp(low, high), rtol=1e-6, atol=1e-7)  # soft starts at the float weight

    v.data.add_(kit.values(4, 6, seed=3))
    theirs = v.detach().clone().requires_grad_()
    h = (torch.sigmoid(theirs) * 1.2 - 0.1).clamp(0, 1)
    y = s * (torch.floor(w / s) + h + zero).clamp(spec.qmin, spec.qmax) - s * zero
    (y * g).sum().backward()
    (made(w) * g).sum().backward()
    torch.testing.assert_close(made(w), y, **kit.EXACT)
    torch.testing.assert_close(v.grad, theirs.grad, **kit.EXACT)

    for beta in (20.0, 2.0):
        v.grad = theirs.grad = None
        made.regularizer(beta).backward()
        h = (torch.sigmoid(theirs) * 1.2 - 0.1).clamp(0, 1)
        (1 - (2 * h - 1).abs() ** beta).sum().backward()
        torch.testing.assert_close(v.grad, theirs.grad, **kit.EXACT)

    made.stop_learning()
    assert made.rounding is Rounding.HARD
    up = (v.detach() >= 0).double()
    hard = ((torch.floor(w / s) + up + zero).clamp(spec.qmin, spec.qmax) - zero) * s
    assert torch.equal(made(w), hard)
    assert torch.equal(made.bake(w), hard)
    made.forget_rounding()
    assert torch.equal(made(w), nearest)


def test_adaround_hard_is_what_is_exported_and_loads_again() -> None:
    w = 2 * kit.values(8, 6).float()
    made = kit.quantizer("adaround", QuantSpec(bits=4, granularity=PerChannel(0)), [0.3] * 8).float()
    assert bool((w.abs() > 8 * 0.3).any())
    made.start_learning(w).data.copy_(kit.values(8, 6, seed=5))
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
    # Also of a weight beyond the range: its integer is the last one, and may be left again.
    assert bool((learning.grad == 1).all())
    with pytest.raises(CalibrationError, match="learned for"):
        made(w[:, :3])
