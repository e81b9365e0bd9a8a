"""Batch norms that stay: tuned to the quantized model, or trained with the statistics of their batches, and folded."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onnxq.errors import PlanError
from onnxq.sites import Role
from tests.torch.exporting import PRODUCTS, assert_same
from tests.torch.nets import Network, calibrate, images, observe, settled, take_step
from tests.torch.quant_model.kit import W4A4, calibrated, model
from tests.torch.tracing.test_fold import NormAct
from torch_frontend import qat
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import QuantModel, State


def unfused(**weights: Any) -> QuantModel:
    return calibrate(model({**W4A4, "weights": {"bits": 4, **weights}, "torch": {"fuse_bn": False}}), images())


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


def draw(seed: int) -> Tensor:
    return images(6, seed)[..., :8, :8]


def make(target: str, kind: str, fuse: bool, **weights: Any) -> QuantModel:
    """Two convolutions and a classifier, each with a batch norm, the second as timm writes it."""
    torch.manual_seed(0)
    first = {"a": nn.Conv2d(3, 8, 3, padding=1, bias=False), "bn": nn.BatchNorm2d(8)}
    rest = {"b": nn.Conv2d(8, 8, 3, padding=1), "act": NormAct(8), "fc": nn.Linear(8, 6), "last": nn.BatchNorm1d(6)}
    net = settled(Network(lambda m, x: m.last(m.fc(m.act(m.b(m.bn(m.a(x)).relu())).mean((2, 3)))), **first, **rest))
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
