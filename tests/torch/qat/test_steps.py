"""The steps of a training: first qparams, optimizer groups, the schedule, distillation; low-rank adapters."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.errors import CalibrationError, ConfigError
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.torch.nets import observe, take_step
from tests.torch.qat.kit import Net, batch, observed
from torch_frontend import qat
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import PartialStateWarning, QuantModel
from torch_frontend.quantizers import quantizers_of


def test_observing_rounds_nothing_and_ends_with_numbers() -> None:
    net, plain = Net(), Net()
    for found in quantizers_of(plain):
        found.enabled = False
    with qat.observing(net):
        assert torch.equal(net(batch(0)), plain(batch(0)))
    assert all(found.calibrated and found.enabled and not found.observing for found in quantizers_of(net))
    assert not torch.equal(net(batch(0)), plain(batch(0)))
    # Numbers that are there stay.
    before = [found.qparams().scale.copy() for found in quantizers_of(net)]
    with qat.observing(net):
        net(100 * batch(0))
    assert all((found.qparams().scale == was).all() for found, was in zip(quantizers_of(net), before, strict=True))


def test_scales_that_were_observed_in_inference_mode_learn() -> None:
    net = Net("lsq+")
    with torch.inference_mode():
        observe(net, batch(0))
    net(batch(0)).sum().backward()
    assert all(found.scale.grad.isfinite().all() for found in quantizers_of(net))


def test_a_site_no_batch_reached_is_named() -> None:
    net = Net()
    with pytest.raises(CalibrationError, match=r"b\.in"), qat.observing(net):
        net.a(batch(0))
    # Nor does a batch that fails leave a quantizer observing.
    net = Net()
    with pytest.raises(RuntimeError), qat.observing(net):
        net(torch.zeros(1, 7, 6, 6))
    assert not any(found.observing for found in quantizers_of(net))
    assert all(found.enabled for found in quantizers_of(net))


def test_every_parameter_is_in_one_group() -> None:
    net = observed()
    groups = {group["name"]: group for group in qat.parameter_groups(net, lr=0.1, weight_decay=0.01)}
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in net.parameters())
    assert {id(p) for p in groups["qparams"]["params"]} == {id(found.scale) for found in quantizers_of(net)}
    assert (groups["qparams"]["lr"], groups["qparams"]["weight_decay"]) == (0.01, 0.0)
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (0.1, 0.01)
    assert all(p.ndim <= 1 for p in groups["biases and norms"]["params"])
    assert groups["biases and norms"]["weight_decay"] == 0.0
    torch.optim.SGD(list(groups.values()))


def test_an_optimizer_without_the_scales_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"a\.in.*no qparams to learn"):
        qat.parameter_groups(Net(), lr=0.1)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"lr": 0.1, "qparam_lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}])
def test_rates_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        qat.parameter_groups(observed(), **wrong)


def test_the_schedule_switches_and_freezes_at_its_steps() -> None:
    net = observed()
    pacer = qat.Pacer(net, qat.Schedule(weights=1, activations=2, freeze_batch_norms=3, freeze_scales=4))
    seen = []
    for _ in range(5):
        net.train()
        pacer.step()
        states = {found.role: found.enabled for found in quantizers_of(net)}
        frozen = {not found.scale.requires_grad for found in quantizers_of(net)}
        seen.append((states[Role.WEIGHT], states[Role.ACTIVATION], not net.a.norm.training, frozen))
    assert seen == [
        (False, False, False, {False}),
        (True, False, False, {False}),
        (True, True, False, {False}),
        (True, True, True, {False}),
        (True, True, True, {True}),
    ]
    # One that goes on where it stopped; what a pass disabled stays off whatever the pace.
    again = qat.Pacer(net, qat.Schedule(activations=5))
    again.load_state_dict(pacer.state_dict())
    net.a.seen.disabled_reason = "redundant"
    again.step()
    assert again.steps == 6
    assert not net.a.seen.active
    assert net.b.seen.active


@pytest.mark.parametrize("wrong", [{"weights": -1}, {"freeze_scales": 1.5}, {"activations": True}])
def test_a_step_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))}.*\[Q318\]"):
        qat.Schedule(**wrong)


def test_nan_in_a_scale_names_its_site() -> None:
    net = observed()
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.1))
    qat.Pacer(net).attach(optimizer)
    net.b.seen.scale.grad = torch.full_like(net.b.seen.scale, float("nan"))
    with pytest.raises(CalibrationError, match=r"b\.in.*\[Q510\]"):
        optimizer.step()


def test_the_distillation_loss_is_the_papers() -> None:
    torch.manual_seed(3)
    student, teacher, task = torch.randn(5, 7), torch.randn(5, 7), torch.tensor(2.0)
    t, alpha = 3.0, 0.25
    p, q = (teacher / t).softmax(-1), (student / t).softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    mixed = qat.Distiller(nn.Identity(), temperature=t, alpha=alpha).loss(student, teacher, task)
    torch.testing.assert_close(mixed, (1 - alpha) * task + alpha * t * t * kl)


def test_the_teacher_is_a_copy_without_gradients() -> None:
    float_net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9))
    distiller = qat.Distiller(float_net)
    x = torch.randn(2, 3)
    want = float_net[0](x)
    with torch.no_grad():
        float_net[0].weight.zero_()
    assert torch.equal(distiller.answers(x), want)
    assert not distiller.answers(x).requires_grad
    with pytest.raises(ConfigError):
        qat.Distiller(float_net, temperature=0)


def test_the_engine_has_a_door_to_it() -> None:
    from onnxq import qat as door

    assert door.Pacer is qat.Pacer
    assert set(qat.__all__) == set(dir(door))


class Adapted(nn.Module):
    """A Linear and two thin ones beside it, of which the second starts at 0."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merge(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def calibrate(net: nn.Module, config: dict[str, Any], x: Tensor) -> QuantModel:
    return observe(QuantModel(net, config, example_inputs=x), x).init_qat()


def check_file(model: QuantModel, x: Tensor) -> int:
    """The number of weights with pairs; the file computes as the model does."""
    done = to_onnx(model.freeze(), x)
    found = Session(done.model, optimize=False).run({done.model.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(next(iter(found.values())), model(x).detach().numpy(), atol=1e-4)
    return [node.op_type for node in done.model.graph.node].count("DequantizeLinear")


def test_adapters_are_trained_exported_and_merged() -> None:
    x, wanted = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)), make_net()
    net = nn.Sequential(*(Adapted(part) if isinstance(part, nn.Linear) else part for part in make_net()))
    with torch.no_grad():
        wanted[0].weight.add_(0.1)
        answers = wanted(x)
    config = {"extends": "ort-int4-weights", "rules": [{"node": ["*.down", "*.up"], "set": {"float": True}}]}
    model = calibrate(net, config, x)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".up." in name or ".down." in name)
    before = model.state_dict()["model.0.base.weight"].clone()
    optimizer = torch.optim.Adam(qat.parameter_groups(model, lr=0.02))
    losses = [take_step(optimizer, (model(x) - answers).square().mean()) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.equal(model.state_dict()["model.0.base.weight"], before)
    assert check_file(model, x) == 2

    trained = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    net.load_state_dict({name: trained[name] for name in net.state_dict()})
    merged = nn.Sequential(*(part.merge() if isinstance(part, Adapted) else part for part in net))
    final = calibrate(make_net(), {"extends": "ort-int4-weights"}, x)
    with pytest.warns(PartialStateWarning, match="scales are from before"):
        final.load_state_dict(merged.state_dict())
    observe(final, x).init_qat()
    assert float((final(x) - answers).square().mean().detach()) < 0.5 * losses[0]
    assert check_file(final, x) == 2
