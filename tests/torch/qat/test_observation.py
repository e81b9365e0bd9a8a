"""First qparams from batches, and the same on every rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from onnxq.errors import CalibrationError
from onnxq.spec import QParams
from tests.torch.qat.kit import Net, batch, observed
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
    qat.share_qparams(net, source=1)
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
    """The steps of `observing` between ranks, without processes."""
    for kind in ("uniform", "lsq", "lsq+", "pact"):
        whole, left, right = Net(kind).eval(), Net(kind).eval(), Net(kind).eval()
        for net, seeds in ((whole, (0, 1)), (left, (0,)), (right, (1,))):
            for seed in seeds:
                net.a.seen.observe(batch(seed) * (1 + seed))
        left.a.seen.merge_observations([left.a.seen.observations(), right.a.seen.observations()])
        for net in (whole, left):
            net.a.seen.calc_qparams()
        assert left.a.seen.qparams().scale == pytest.approx(whole.a.seen.qparams().scale, rel=1e-6)
