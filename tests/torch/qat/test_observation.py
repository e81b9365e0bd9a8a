"""First qparams from batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError
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
