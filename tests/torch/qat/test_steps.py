"""The steps of a training: first qparams, optimizer groups, the schedule, distillation."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from tests.torch.qat.kit import Net, batch, observed, train
from torch_frontend import qat
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


def test_frozen_batch_norms_and_scales_stay_while_weights_train() -> None:
    net = observed()
    train(net, 4, qat.Schedule())
    mean, scale = net.a.norm.running_mean.clone(), net.a.seen.scale.detach().clone()
    weight = net.a.conv.weight.detach().clone()
    train(net, 4, qat.Schedule(freeze_batch_norms=0, freeze_scales=0))
    assert torch.equal(net.a.norm.running_mean, mean)
    assert torch.equal(net.a.seen.scale, scale)
    assert not torch.equal(net.a.conv.weight, weight)


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
