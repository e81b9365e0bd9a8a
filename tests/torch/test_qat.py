"""What a training loop is given: first numbers, optimizer groups, a pace, a teacher; and the same on every rank."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerChannel, QParams, QuantSpec
from torch_frontend import qat
from torch_frontend.quantizers import create_quantizer, quantizers_of

U4 = QuantSpec(bits=4, signed=False, symmetric=False)
W4 = QuantSpec(bits=4, granularity=PerChannel(0))


class Layer(nn.Module):
    """A convolution with batch norm, its input and weight quantized."""

    def __init__(self, name: str, wide: int, out: int, kind: str, observer: str = "minmax") -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.seen = create_quantizer(kind, U4, site=f"{name}.in", observer=ObserverSpec(observer))
        self.weight = create_quantizer(kind if kind != "pact" else "lsq", W4, site=f"{name}.weight", role=Role.WEIGHT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.conv2d(self.seen(x), self.weight(self.conv.weight), padding=1)).relu()


class Net(nn.Module):
    def __init__(self, kind: str = "lsq", observer: str = "minmax") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = Layer("a", 1, 4, kind, observer)
        self.b = Layer("b", 4, 4, kind, observer)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)).mean((2, 3)))


def batch(seed: int, count: int = 8) -> torch.Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def observed(kind: str = "lsq") -> Net:
    net = Net(kind)
    with qat.observing(net):
        net(batch(0))
    return net


def test_observing_rounds_nothing_and_ends_with_numbers() -> None:
    net, plain = Net(), Net()
    for found in quantizers_of(plain):
        found.enabled = False
    with qat.observing(net):
        assert torch.equal(net(batch(0)), plain(batch(0)))
    assert all(found.calibrated and found.enabled and not found.observing for found in quantizers_of(net))
    assert not torch.equal(net(batch(0)), plain(batch(0)))


def test_observing_leaves_numbers_that_are_there() -> None:
    net = observed()
    before = [found.qparams().scale.copy() for found in quantizers_of(net)]
    with qat.observing(net):
        net(100 * batch(0))
    assert all((found.qparams().scale == was).all() for found, was in zip(quantizers_of(net), before, strict=True))


def test_a_site_no_batch_reached_is_named() -> None:
    net = Net()
    with pytest.raises(CalibrationError, match=r"b\.in"), qat.observing(net):
        net.a(batch(0))


def test_a_failing_batch_leaves_no_quantizer_observing() -> None:
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
    with pytest.raises(CalibrationError, match=r"a\.in.*no numbers to learn"):
        qat.parameter_groups(Net(), lr=0.1)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"lr": 0.1, "qparam_lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}])
def test_rates_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        qat.parameter_groups(observed(), **wrong)


def train(net: Net, steps: int, schedule: qat.Schedule, seed: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.05), momentum=0.9)
    pacer = qat.Pacer(net, schedule)
    pacer.attach(optimizer)
    losses = []
    for step in range(steps):
        net.train()
        pacer.step()
        x = batch(seed + step % 4)
        loss = F.cross_entropy(net(x), (x.mean((1, 2, 3)) * 6 - 2).long().clamp(0, 2)) + qat.penalty(net)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact"])
def test_training_lowers_the_loss_and_moves_the_numbers(kind: str) -> None:
    net = Net(kind)
    with qat.observing(net):
        net(batch(0))
    before = [found.qparams().scale.copy() for found in quantizers_of(net)]
    losses = train(net, 60, qat.Schedule())
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert all((found.qparams().scale != was).any() for found, was in zip(quantizers_of(net), before, strict=True))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_with_float32_scales(dtype: torch.dtype) -> None:
    net = observed()
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.01))
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(net(batch(1)), torch.zeros(8, dtype=torch.long))
    loss.backward()
    assert net.a.seen.scale.dtype == net.a.seen.scale.grad.dtype == torch.float32
    assert net.a.seen.scale.grad.isfinite().all()
    optimizer.step()


def test_compiled_training_is_the_same_training() -> None:
    net = observed().train()
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for found, run in ((net, net), (other, compiled)):
        F.cross_entropy(run(batch(1)), torch.zeros(8, dtype=torch.long)).backward()
        assert found.a.seen.scale.grad is not None
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


KINDS = (("uniform", "percentile"), ("lsq", "minmax"), ("lsq+", "minmax"))


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.save([_trained(rank, *how) for how in KINDS], Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _trained(rank: int, kind: str, observer: str) -> tuple[dict[str, QParams], QParams]:
    """Numbers after three steps, and one site's after rank 1 has given its own to all."""
    net = Net(kind, observer)
    with qat.observing(net.eval()):
        net(batch(rank) * (1 + rank))
    ddp = nn.parallel.DistributedDataParallel(net.train())
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.05))
    qat.Pacer(net).attach(optimizer)
    for step in range(3):
        loss = F.cross_entropy(ddp(batch(10 + 2 * step + rank)), torch.arange(8) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    numbers = {found.site: found.qparams() for found in quantizers_of(net)}
    if rank == 1:
        net.a.seen.calc_qparams_with_minmax(0.0, 9.0)
    qat.share_numbers(net, source=1)
    return numbers, net.a.seen.qparams()


def test_ranks_agree_on_all_numbers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{k}.pt", weights_only=False) for k in range(2)]
    for (first, given), (second, same) in zip(*ranks, strict=True):
        assert set(first) == {"a.in", "a.weight", "b.in", "b.weight"}
        for site in first:
            assert (first[site].scale == second[site].scale).all()
            assert (first[site].zero_point == second[site].zero_point).all()
        assert float(given.scale) == float(same.scale) == pytest.approx(9.0 / 15)


def test_numbers_of_two_ranks_are_those_of_one_that_saw_all() -> None:
    """What `observing` does between ranks, without processes."""
    for kind in ("uniform", "lsq", "lsq+", "pact"):
        whole, left, right = Net(kind).eval(), Net(kind).eval(), Net(kind).eval()
        for net, seeds in ((whole, (0, 1)), (left, (0,)), (right, (1,))):
            for seed in seeds:
                net.a.seen.observe(batch(seed) * (1 + seed))
        left.a.seen.merge_observations([left.a.seen.observations(), right.a.seen.observations()])
        for net in (whole, left):
            net.a.seen.calc_qparams()
        assert left.a.seen.qparams().scale == pytest.approx(whole.a.seen.qparams().scale, rel=1e-6)


def test_the_engine_has_a_door_to_it() -> None:
    from onnxq import qat as door

    assert door.Pacer is qat.Pacer
    assert set(qat.__all__) == set(dir(door))
