"""Calibration: ranges of all batches, asymmetric calibration; batch norms that stay: tuned, or trained, and folded."""

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onnxq.errors import CalibrationError, PlanError
from onnxq.sites import Role
from tests.torch.exporting import PRODUCTS, assert_same
from tests.torch.nets import Around, Branching, Network, ResNet, calibrate, images, observe, settled, take_step
from tests.torch.quant_model.kit import W4A4, calibrated, make_seeded, model
from tests.torch.tracing.test_fold import NormAct
from torch_frontend import qat
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel, State


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
    x = 40.0 * torch.randn(2, 8, 8, 8)
    made = calibrate(QuantModel(net, target="ort"), x)
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


def _chain() -> nn.Module:
    a, b, c = (nn.Linear(6, 6, bias=False) for _ in range(3))
    return Network(lambda m, x: m.c(m.b(m.a(x))), a=a, b=b, c=c)


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
    net, x = _chain(), torch.randn(16, 6)
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
    made = calibrate(QuantModel(Around().eval(), W4A4), x, asym=True).set_quant()
    assert made(x).isfinite().all()
    with pytest.raises(PlanError, match="not traced"):
        calibrate(QuantModel(Branching(), W4A4), x, asym=True)


def unfused(**weights: Any) -> QuantModel:
    made = model({**W4A4, "weights": {"bits": 4, **weights}, "torch": {"fuse_bn": False}})
    return calibrate(made, images())


def test_tuned_batch_norms_fold_into_their_layers_and_scales_follow() -> None:
    made, x = unfused(), images(8, seed=3)
    norms = {n: m for n, m in made.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    with torch.no_grad():
        norms["bn"].weight[0] = -0.7
    scale = made.quantizers["stem.weight"].scale.clone()
    with made.batchnorm_tuning():
        made(x[:4])
        made(x[4:])
        norm, stem = copy.deepcopy(norms["bn"]), made.model.get_submodule("stem")
        # Statistics are the mean over the batches.
        outs = [stem(made.quantizers["input:x"](part)).mean((0, 2, 3)) for part in (x[:4], x[4:])]
        torch.testing.assert_close(norm.running_mean, sum(outs) / 2, rtol=1e-4, atol=1e-5)
        unfolded = copy.deepcopy(made).eval()
    made.eval()
    torch.testing.assert_close(made(x), unfolded(x), rtol=1e-3, atol=1e-3)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules())
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    torch.testing.assert_close(made.quantizers["stem.weight"].scale, scale * factor.abs().detach())
    assert [d.subject for d in made.decisions if d.rule == "batchnorm-tuning"] == list(norms)
    assert made.state is State.QUANTIZED


def test_tuning_refuses_weights_with_one_scale_and_a_model_without_batch_norms() -> None:
    refused = (
        (unfused(granularity="tensor"), r"^stem: its weight has one"),
        (calibrated(), r"\[Q410\]\n.*fuse_bn: false"),
    )
    for made, why in refused:
        with pytest.raises(PlanError, match=why), made.batchnorm_tuning():
            pass


def test_tuning_mends_statistics_that_are_off() -> None:
    net, x = make_seeded(ResNet), images(8, seed=3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net(x)
    wanted = net.eval()(x)
    net.bn.running_mean.add_(1.0)
    made = QuantModel(net, {"target": "virtual", "torch": {"fuse_bn": False}})
    calibrate(made, x).set_quant()
    before = (made(x) - wanted).square().mean()
    with made.batchnorm_tuning():
        made(x)
    assert (made.eval()(x) - wanted).square().mean() < 0.1 * before


class Normed(nn.Module):
    """Two convolutions and a classifier, each with a batch norm, the second as timm writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.b, self.act = nn.Conv2d(8, 8, 3, padding=1), NormAct(8)
        self.fc, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.b(self.relu(self.bn(self.a(x)))))
        return self.last(self.fc(x.mean((2, 3))))


def draw(seed: int) -> Tensor:
    return images(6, seed)[..., :8, :8]


def make(target: str, kind: str, fuse: bool, **weights: Any) -> QuantModel:
    torch.manual_seed(0)
    net = settled(Normed())
    with torch.no_grad():
        net.bn.weight[0] = net.act.weight[1] = -0.7
    config = {
        "target": target,
        "rules": [PRODUCTS] if target == "ort" else [],
        "weights": weights,
        "torch": {"fuse_bn": fuse, "weights": {"quantizer": kind}},
    }
    return observe(QuantModel(net, config, example_inputs=draw(0)), draw(1))


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: one for name, one in model.named_modules() if isinstance(one, _BatchNorm)}


@pytest.mark.parametrize(("target", "kind"), [("ort", "lsq"), ("virtual", "uniform"), ("trt", "lsq+")])
def test_batch_norms_train_and_freeze_folds_them(target: str, kind: str) -> None:
    model = make(target, kind, fuse=False)
    # The pairs stand where those of the folded model do.
    assert len(model.quantizers) == len(make(target, kind, fuse=True).quantizers)
    layers = {"model.bn": "a", "model.act.batch_norm": "b", "model.last": "fc"}
    assert set(norms_of(model)) == set(layers)
    before = [norm.running_var.clone() for norm in norms_of(model).values()]
    model.init_qat()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.05), momentum=0.9)
    qat.Pacer(model, qat.Schedule()).attach(optimizer)
    for seed in (2, 3):
        take_step(optimizer, model(draw(seed)).square().mean())
    for variance, norm in zip(before, norms_of(model).values(), strict=True):
        assert not torch.equal(variance, norm.running_var)

    x = draw(4)
    with torch.no_grad():
        wanted = model.eval()(x)
        trained = {}
        for name, norm in norms_of(model).items():
            weight = model.model.get_submodule(layers[name]).quantized_weight()
            factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            trained[layers[name]] = weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
        unfrozen = to_onnx(model, x)
        assert len(norms_of(model)) == 3
        model.freeze()
        for path, weight in trained.items():
            folded = model.model.get_submodule(path).quantized_weight()
            # A weight on the edge of two levels may fall to the other side.
            assert int((~torch.isclose(folded, weight, rtol=1e-4, atol=1e-5)).sum()) <= 1
        torch.testing.assert_close(model(x), wanted, rtol=1e-2, atol=1e-2)
    assert not norms_of(model)
    folds = [d.reason for d in model.decisions if d.rule == "fuse-bn"]
    assert folds == [f"trained and folded into {path}" for path in ("a", "b", "fc")]
    assert len(model.freeze().decisions) == len(model.decisions)
    assert not [node for node in unfrozen.model.graph.node if node.op_type == "BatchNormalization"]
    assert_same(model.model, unfrozen, x)


def test_a_weight_with_one_scale_keeps_its_batch_norm_and_says_why() -> None:
    model = make("virtual", "lsq", fuse=False, granularity="tensor")
    wanted = model.set_quant().eval()(draw(4))
    model.freeze()
    assert len(norms_of(model)) == 3
    assert all("one scale" in d.reason for d in model.decisions if d.rule == "fuse-bn")
    assert [q.spec.granularity for q in model.quantizers.values() if q.role is Role.WEIGHT]
    assert torch.equal(model(draw(4)), wanted)
