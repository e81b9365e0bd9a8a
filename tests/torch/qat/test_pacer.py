"""The schedule of a training: switches, frozen scales and batch norms, NaN by site."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from tests.torch.qat.kit import observed, train
from torch_frontend import qat
from torch_frontend.quantizers import quantizers_of


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


def test_frozen_batch_norms_and_scales_stay_while_weights_train() -> None:
    net = observed()
    train(net, 4, qat.Schedule())
    mean, scale = net.a.norm.running_mean.clone(), net.a.seen.scale.detach().clone()
    weight = net.a.conv.weight.detach().clone()
    train(net, 4, qat.Schedule(freeze_batch_norms=0, freeze_scales=0))
    assert torch.equal(net.a.norm.running_mean, mean)
    assert torch.equal(net.a.seen.scale, scale)
    assert not torch.equal(net.a.conv.weight, weight)


def test_what_a_pass_disabled_stays_off_whatever_the_pace() -> None:
    net = observed()
    net.a.seen.disabled_reason = "redundant"
    qat.Pacer(net).step()
    assert not net.a.seen.active
    assert net.b.seen.active


def test_a_pacer_goes_on_where_it_stopped() -> None:
    net = observed()
    first = qat.Pacer(net, qat.Schedule(activations=3))
    first.step()
    second = qat.Pacer(net, qat.Schedule(activations=3))
    second.load_state_dict(first.state_dict())
    assert second.steps == 1


@pytest.mark.parametrize("wrong", [{"weights": -1}, {"freeze_scales": 1.5}, {"activations": True}])
def test_a_step_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        qat.Schedule(**wrong)


def test_nan_in_a_scale_names_its_site() -> None:
    net = observed()
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.1))
    qat.Pacer(net).attach(optimizer)
    net.b.seen.scale.grad = torch.full_like(net.b.seen.scale, float("nan"))
    with pytest.raises(CalibrationError, match=r"b\.in"):
        optimizer.step()
