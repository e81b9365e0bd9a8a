"""Each algorithm against its paper: gradients by autograd in float64, first numbers, and one update by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.quantizers import AdaRound, PostStep, Quantizer, Rounding, create_quantizer, penalty

Tensor = torch.Tensor
BITS = (2, 3, 4, 8, 16)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def values(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quantizer(
    name: str, spec: QuantSpec, scale: object, zero: object = 0, role: Role = Role.WEIGHT, **how
) -> Quantizer:
    made = create_quantizer(name, spec, site="s", role=role, **how)
    scale = np.asarray(scale, np.float32)
    made.load_qparams(QParams(scale, np.broadcast_to(np.asarray(zero, np.int32), scale.shape).copy()))
    return made.double()


def rounded(t: Tensor) -> Tensor:
    return t + (t.round() - t).detach()


def factored(s: Tensor, factor: float) -> Tensor:
    """s, with its gradient multiplied."""
    return s * factor + (s - s * factor).detach()


def along(s: Tensor, spec: QuantSpec, x: Tensor) -> Tensor:
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return s
    if isinstance(grain, PerChannel):
        return s.reshape([-1 if k == grain.axis % x.dim() else 1 for k in range(x.dim())])
    return s.repeat_interleave(grain.size, grain.axis).narrow(grain.axis, 0, x.shape[grain.axis])


# -- LSQ ---------------------------------------------------------------------------------------------------------


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
    torch.testing.assert_close(relu.scale.detach(), 2 * w.abs().mean() / math.sqrt(2**bits - 1))
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


# -- LSQ+ --------------------------------------------------------------------------------------------------------


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


# -- PACT --------------------------------------------------------------------------------------------------------


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
    """alpha = 3 with levels 0, 1, 2, 3: only what is at or above 3 moves it, and the penalty pulls it down."""
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
    assert penalty(pact) is None


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


# -- DoReFa ------------------------------------------------------------------------------------------------------


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


# -- AdaRound ----------------------------------------------------------------------------------------------------


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
    v = made.start(w)
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

    made.finish()
    assert made.rounding is Rounding.HARD
    up = (v.detach() >= 0).double()
    hard = ((torch.floor(w / s) + up + zero).clamp(spec.qmin, spec.qmax) - zero) * s
    assert torch.equal(made(w), hard)
    assert torch.equal(made.bake(w), hard)
    made.forget()
    assert torch.equal(made(w), nearest)


def test_adaround_hard_is_what_is_exported_and_loads_again() -> None:
    w = values(8, 6).float()
    made = quantizer("adaround", QuantSpec(bits=4, granularity=PerChannel(0)), [0.3] * 8).float()
    made.start(w).data.copy_(values(8, 6, seed=5))
    made.finish()
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
    v = made.start(w)
    assert float(v.detach()) == pytest.approx(-math.log(2), rel=1e-6)
    made(w).sum().backward()
    torch.optim.SGD([v], lr=1.0).step()
    sigma = 1 / 3
    assert float(v.detach()) == pytest.approx(-math.log(2) - 1.2 * sigma * (1 - sigma), rel=1e-6)


# -- after each step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lsq", "lsq+", "pact"])
def test_scales_stay_positive_whatever_the_optimizer_does(name: str) -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    made = quantizer(name, spec, 0.1, role=Role.ACTIVATION).float()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e6)
    handle = PostStep(made).attach(optimizer)
    made(torch.full((2, 3), 50.0)).sum().backward()
    optimizer.step()
    assert np.all(made.qparams().scale > 0)
    y = made(torch.ones(2, 3))
    assert bool(y.isfinite().all())
    handle.remove()


@pytest.mark.parametrize("name", ["lsq", "lsq+", "pact"])
def test_nan_in_training_names_the_site(name: str) -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    net = torch.nn.ModuleDict({k: quantizer(name, spec, 0.1, role=Role.ACTIVATION) for k in ("a", "b")})
    net["b"].site = "layer1.relu.out"
    upkeep = PostStep(net)
    upkeep()
    next(net["b"].parameters()).data.fill_(float("nan"))
    with pytest.raises(CalibrationError, match=r"(?s)layer1\.relu\.out: .*no longer a finite number.*learning rate"):
        upkeep()
    with pytest.raises(CalibrationError, match=r"layer1\.relu\.out"):
        net["b"].qparams()


def test_nothing_to_keep_up_is_fine() -> None:
    net = torch.nn.ModuleDict({"a": create_quantizer("lsq", QuantSpec(), site="s")})
    PostStep(net)()
    assert penalty(net) is None
