"""Quantizers on an NVIDIA GPU: numbers appear where the model is, and upkeep after a step does not wait for it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn

from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.nets import observe
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.quantizers import AdaRound, PostStep, create_quantizer, quantizers_of
from torch_frontend.reconstruct import Settings, reconstruct

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(12, 8)
        self.seen = create_quantizer("lsq+", QuantSpec(bits=4, signed=False, symmetric=False), site="x")
        three_bits = QuantSpec(bits=3, granularity=PerChannel(0))
        self.weight_quantizer = create_quantizer("lsq", three_bits, site="w", role=Role.WEIGHT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.seen(x), self.weight_quantizer(self.weight), self.bias)


def calibrated(device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net, x = nn.Sequential(Layer()), torch.randn(64, 4) @ torch.randn(4, 12)
    return observe(net.to(device), x.to(device)), x.to(device)


def test_numbers_are_where_the_model_is_and_equal_the_cpu_s() -> None:
    (here, x), (there, y) = calibrated("cpu"), calibrated("cuda")
    assert all(p.is_cuda for p in there.parameters())
    for a, b in zip(quantizers_of(here), quantizers_of(there), strict=True):
        np.testing.assert_allclose(a.qparams().scale, b.qparams().scale, rtol=1e-6)
        b.load_qparams(a.qparams())
    torch.testing.assert_close(there(y).cpu(), here(x), rtol=1e-5, atol=1e-5)
    fresh = nn.Sequential(Layer()).cuda()
    fresh.load_state_dict(here.state_dict())
    assert all(p.is_cuda for p in fresh.parameters())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_upkeep_does_not_wait_and_still_finds_nan() -> None:
    net, x = calibrated("cuda")
    upkeep = PostStep(net, every=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(6):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            upkeep()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    net[0].weight_quantizer.scale.data[3] = float("nan")
    upkeep()
    upkeep()
    torch.cuda.synchronize()
    upkeep()
    with pytest.raises(CalibrationError, match="w: its learned scale"):
        upkeep()
    with pytest.raises(CalibrationError, match="w: its learned scale"):
        upkeep.check()


def test_reconstruction_runs_there() -> None:
    net, x = calibrated("cuda")
    for limit in (1 << 30, 1):
        done = reconstruct(net, x.split(20), qdrop=0.5, settings=Settings(iterations=100, lr=0.03, cache_bytes=limit))
        assert done.units[0].kept
    assert isinstance(net[0].weight_quantizer, AdaRound)
    assert net[0].weight_quantizer.v.is_cuda


@pytest.mark.parametrize(("shape", "order"), [((16, 33), (0, 1)), ((16, 8, 3, 3), (0, 2, 3, 1))])
def test_weights_keep_sums_as_on_the_cpu(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, dy = torch.empty(shape).uniform_(-1, 1), torch.randn(shape)
    found = []
    for device in ("cpu", "cuda"):
        x, scale = (t.detach().to(device).requires_grad_() for t in (weight, torch.full(shape[:1], 1 / 127)))
        zero = torch.zeros(shape[0], device=device)
        y = fake_quantize(x, scale, zero, qmin=-128, qmax=127, axis=0, sum_orders=[order])
        y.backward(dy.to(device))
        found.append([t.detach().cpu() for t in (y, x.grad, scale.grad)])
    (y, dx, dscale), (other_y, other_dx, other_dscale) = found
    assert torch.equal(y, other_y)
    assert torch.equal(dx, other_dx)
    torch.testing.assert_close(dscale, other_dscale, rtol=1e-5, atol=1e-3)
