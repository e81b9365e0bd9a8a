"""Training loops: the loss falls, in mixed precision and compiled, too."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F

from tests.torch.qat.kit import Net, batch, observed, train
from torch_frontend import qat
from torch_frontend.quantizers import quantizers_of


@pytest.mark.parametrize("kind", ["lsq", "lsq+", "pact"])
def test_training_lowers_the_loss_and_moves_the_numbers(kind: str) -> None:
    net = Net(kind)
    with qat.observing(net):
        net(batch(0))
    before = [found.qparams().scale.copy() for found in quantizers_of(net)]
    losses = train(net, 60, qat.Schedule())
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert all((found.qparams().scale != was).any() for found, was in zip(quantizers_of(net), before, strict=True))


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


def test_the_engine_has_a_door_to_it() -> None:
    from onnxq import qat as door

    assert door.Pacer is qat.Pacer
    assert set(qat.__all__) == set(dir(door))
