"""Calibration: ranges of all batches, asymmetric calibration, and the sites it names when it cannot."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.errors import CalibrationError, PlanError
from tests.torch.nets import Around, Branching, Network, calibrate, images
from tests.torch.quant_model.kit import W4A4, calibrated, model
from torch_frontend.quant_model import QuantModel


def test_calibration_that_reaches_nothing_or_nan_names_the_sites() -> None:
    made = model().prepare_calibration()
    with pytest.raises(CalibrationError, match=r"input:x, max_pool2d\.out.*no batch reached it"):
        made.calc_qparams()
    made = model().prepare_calibration()
    with pytest.raises(CalibrationError, match=r"^input:x: 1 NaN"):
        made(images().index_fill(0, torch.tensor([0]), 0.0).put_(torch.tensor([3]), torch.tensor([float("nan")])))


def test_a_scale_that_became_nan_in_training_names_the_sites() -> None:
    made = calibrated({**W4A4, "torch": {"weights": {"quantizer": "lsq"}}}).init_qat()
    made.quantizers["fc.weight"].scale.data.fill_(float("nan"))
    made.quantizers["stem.weight"].scale.data[0] = float("inf")
    for step in (made.check, made.freeze, made.begin_export):
        with pytest.raises(CalibrationError, match=r"stem\.weight.*fc\.weight"):
            step()


def test_ranges_are_those_of_all_batches_and_weights_those_of_their_tensors() -> None:
    made = calibrated()
    x = torch.cat([images(seed=0), images(seed=1)]).numpy()
    found = made.quantizers["input:x"].qparams()
    np.testing.assert_allclose(found.scale, (x.max() - x.min()) / 15, rtol=1e-6)
    weight = made.weights()["fc.weight"].detach().abs().amax(1).numpy()
    np.testing.assert_allclose(made.quantizers["fc.weight"].qparams().scale, weight / 7, rtol=1e-6)


@pytest.mark.parametrize("top", [6.0, 0.7, 3.3])
def test_levels_stay_inside_a_fused_clip_so_that_the_engine_drops_it(top: float) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Hardtanh(0.0, top), nn.Conv2d(8, 8, 3)).eval()
    made = calibrate(QuantModel(net, target="ort"), 40.0 * torch.randn(2, 8, 8, 8))
    low, high = made.quantizers["1.out"].dequantized_range()
    assert low == 0.0
    assert float(np.nextafter(np.float32(top), np.float32(0))) * 0.999 < high <= np.float32(top)


@pytest.mark.parametrize("quantizer", ["lsq", "lsq+"])
def test_learned_scales_start_inside_a_fused_clip(quantizer: str) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3)).eval()
    config = {"target": "ort", "torch": {"activations": {"quantizer": quantizer}}}
    made = calibrate(QuantModel(net, config), 400.0 * torch.randn(2, 8, 8, 8))
    assert made.quantizers["1.out"].dequantized_range()[1] <= 6.0
    assert made.quantizers["1.out"].scale.requires_grad


def _by_hand(net: nn.Module, x: Tensor, weights: bool, activations: bool) -> dict[str, Tensor]:
    """Scales of a chain, each observed behind the quantized layers before it."""
    found: dict[str, Tensor] = {}

    def rounded(t: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        return (t / scale).round().clamp(low, high) * scale

    for name, site in (("a", "input:x"), ("b", "a.out"), ("c", "b.out")):
        layer = getattr(net, name)
        found[site] = x.abs().max() / 3
        x = rounded(x, found[site], -4, 3) if activations else x
        scale = layer.weight.abs().amax(1, keepdim=True) / 3
        x = x @ (rounded(layer.weight, scale, -4, 3) if weights else layer.weight).T
    return found


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("activations", [False, True])
def test_asym_feeds_each_site_what_its_quantized_predecessors_give(weights: bool, activations: bool) -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(6, 6, bias=False) for name in "abc"}
    net, x = Network(lambda m, x: m.c(m.b(m.a(x))), **layers), torch.randn(16, 6)
    narrow = {"bits": 3, "scheme": "symmetric"}
    made = QuantModel(net, {"target": "virtual", "weights": narrow, "activations": narrow})
    calibrate(made, x[:10], x[10:], asym=True, w_quant=weights, a_quant=activations)
    with torch.no_grad():
        wanted = _by_hand(net, x, weights, activations)
    for site, scale in wanted.items():
        torch.testing.assert_close(made.quantizers[site].scale, scale.reshape(1), rtol=1e-5, atol=0)
    plain = _by_hand(net, x, False, False)
    assert torch.allclose(wanted["b.out"], plain["b.out"], rtol=1e-6) is not (weights or activations)


def test_asym_needs_kept_batches_which_their_owner_does_not_change() -> None:
    made = model().prepare_calibration(keep_inputs=False)
    made(images())
    with pytest.raises(PlanError, match="no batch was kept"):
        made.calc_qparams(asym=True)
    made, x = model().prepare_calibration(), images()
    made(x)
    x.zero_()
    made.calc_qparams(asym=True)
    assert made.quantizers["input:x"].scale > 0.1


def test_asym_works_around_what_cannot_be_traced() -> None:
    x = torch.randn(8, 16)
    assert calibrate(QuantModel(Around().eval(), W4A4), x, asym=True).set_quant()(x).isfinite().all()
    with pytest.raises(PlanError, match="not traced"):
        calibrate(QuantModel(Branching(), W4A4), x, asym=True)
