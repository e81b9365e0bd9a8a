"""Batch norms tuned to the quantized model and folded."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from onnxq.errors import PlanError
from tests.torch.nets import ResNet, images
from tests.torch.quant_model.kit import W4A4, calibrated, make_seeded, model
from torch_frontend.quant_model import QuantModel, State


def unfused(**weights: Any) -> QuantModel:
    made = model({**W4A4, "weights": {"bits": 4, **weights}, "torch": {"fuse_bn": False}}).prepare_calibration()
    made(images())
    return made.calc_qparams()


def test_tuned_batch_norms_fold_into_their_layers_and_scales_follow() -> None:
    made, x = unfused(), images(8, seed=3)
    norms = {n: m for n, m in made.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    with torch.no_grad():
        norms["bn"].weight[0] = -0.7
    scales = {name: made.quantizers[f"{name}.weight"].scale.clone() for name in ("stem", "layer1.1.down.0")}
    with made.batchnorm_tuning():
        made(x[:4])
        made(x[4:])
        norm = copy.deepcopy(norms["bn"])
        unfolded = copy.deepcopy(made).eval()
    made.eval()
    torch.testing.assert_close(made(x), unfolded(x), rtol=1e-3, atol=1e-3)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules())
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    torch.testing.assert_close(made.quantizers["stem.weight"].scale, scales["stem"] * factor.abs().detach())
    assert [d.subject for d in made.decisions if d.rule == "batchnorm-tuning"] == list(norms)
    assert made.state is State.QUANTIZED


def test_tuned_statistics_are_the_mean_over_the_batches() -> None:
    made, x = unfused(), images(8, seed=3)
    with made.batchnorm_tuning():
        made(x[:4])
        made(x[4:])
        norm = made.model.get_submodule("bn")
        stem = made.model.get_submodule("stem")
        held = norm.running_mean.clone()
        outs = [stem(made.quantizers["input:x"](part)).mean((0, 2, 3)) for part in (x[:4], x[4:])]
    torch.testing.assert_close(held, sum(outs) / 2, rtol=1e-4, atol=1e-5)


def test_tuning_mends_statistics_that_are_off() -> None:
    net, x = make_seeded(ResNet), images(8, seed=3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net(x)
    wanted = net.eval()(x)
    net.bn.running_mean.add_(1.0)
    made = QuantModel(net, {"target": "virtual", "torch": {"fuse_bn": False}}).prepare_calibration()
    made(x)
    made.calc_qparams().set_quant()
    before = (made(x) - wanted).square().mean()
    with made.batchnorm_tuning():
        made(x)
    assert (made.eval()(x) - wanted).square().mean() < 0.1 * before


def test_tuning_refuses_weights_with_one_scale_and_names_the_layer() -> None:
    made = unfused(granularity="tensor")
    with pytest.raises(PlanError, match=r"^stem: its weight has one scale"), made.batchnorm_tuning():
        pass


def test_tuning_refuses_a_model_without_batch_norms() -> None:
    with pytest.raises(PlanError, match="fuse_bn: false"), calibrated().batchnorm_tuning():
        pass
