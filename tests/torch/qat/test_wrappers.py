"""torch's own tools around a QuantModel: ranks, shards, compilers, averages, recomputation."""

import copy
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onnxq.spec import QParams
from tests.torch.nets import Network, observe, take_step
from tests.torch.qat import kit
from torch_frontend import qat
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import quantizers_of


def make_batch(seed: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def make_model(recomputed: bool = False) -> QuantModel:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(8, 16), "second": nn.Linear(16, 3)}
    net = Recomputed() if recomputed else Network(lambda m, x: m.second(torch.relu(m.first(x))), **layers)
    config = {
        "target": "virtual",
        "weights": {"bits": 4, "granularity": "tensor"},
        "activations": {"bits": 8},
        "torch": {"weights": {"quantizer": "lsq"}, "activations": {"quantizer": "lsq+"}},
    }
    return observe(QuantModel(net, config), make_batch(0)).init_qat()


def train(model: nn.Module, run: nn.Module, seeds: tuple[int, ...]) -> None:
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.1))
    qat.Pacer(model).attach(optimizer)
    for seed in seeds:
        take_step(optimizer, F.cross_entropy(run(make_batch(seed)), torch.arange(6) % 3))


def compare(one: nn.Module, other: nn.Module, **how: float) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}", **how)


# What ranks import on their way.
IMPORTED = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
# Of quantizers, and of observers.
KINDS = (("uniform", "percentile"), ("lsq", "minmax"), ("lsq+", "minmax"))


def _rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    torch.save(_train_sharded(rank), Path(folder) / f"sharded-{rank}.pt")
    torch.save([_share_numbers(rank, *how) for how in KINDS], Path(folder) / f"shared-{rank}.pt")
    dist.destroy_process_group()


def _train_sharded(rank: int) -> tuple[Any, ...]:
    """State by DistributedDataParallel and by FSDP2, and the latter's numbers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    together = make_model()
    train(together, nn.parallel.DistributedDataParallel(together), (1 + rank, 3 + rank))
    sharded, mesh = make_model(), init_device_mesh("cpu", (2,))
    for layer in (sharded.model.first, sharded.model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, sharded, (1 + rank, 3 + rank))
    sharded.check()
    numbers = {site: found.qparams() for site, found in sharded.quantizers.items() if found.disabled_reason is None}
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return together.state_dict(), whole, numbers


def _share_numbers(rank: int, kind: str, observer: str) -> tuple[dict[str, QParams], QParams]:
    """Numbers after three steps, and one site's after rank 1 has given its own to all."""
    net = kit.Net(kind, observer)
    observe(net.eval(), kit.batch(rank) * (1 + rank))
    ddp = nn.parallel.DistributedDataParallel(net.train())
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.05))
    qat.Pacer(net).attach(optimizer)
    for step in range(3):
        take_step(optimizer, F.cross_entropy(ddp(kit.batch(10 + 2 * step + rank)), torch.arange(8) % 3))
    numbers = {found.site: found.qparams() for found in quantizers_of(net)}
    if rank == 1:
        net.a.seen.calc_qparams_with_minmax(0.0, 9.0)
    qat.share_qparams(net, source=1)
    return numbers, net.a.seen.qparams()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all that two ranks did; they are started once, and torch is imported once for both."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *IMPORTED])
    mp.start_processes(_rank, (port, str(folder)), nprocs=2, start_method="forkserver")
    return folder


def test_ranks_and_shards_train_the_model_that_one_process_trains(ranks: Path) -> None:
    """DistributedDataParallel and FSDP2, which takes no parameter of shape []."""
    (together, whole, numbers), (other, _, same) = (
        torch.load(ranks / f"sharded-{rank}.pt", weights_only=False) for rank in range(2)
    )
    assert numbers == same
    alone, ddp, fsdp = make_model(), make_model(), make_model()
    ddp.load_state_dict(together)
    fsdp.load_state_dict(whole)
    optimizer = torch.optim.SGD(qat.parameter_groups(alone, lr=0.1))
    for seeds in ((1, 2), (3, 4)):
        optimizer.zero_grad()
        for seed in seeds:
            (F.cross_entropy(alone(make_batch(seed)), torch.arange(6) % 3) / 2).backward()
        optimizer.step()
    compare(ddp, alone)
    compare(fsdp, alone)
    ddp.load_state_dict(other)
    compare(ddp, alone)
    assert {site: found.qparams() for site, found in fsdp.quantizers.items() if site in numbers} == numbers


def test_ranks_agree_on_all_numbers(ranks: Path) -> None:
    both = [torch.load(ranks / f"shared-{rank}.pt", weights_only=False) for rank in range(2)]
    for (first, given), (second, same) in zip(*both, strict=True):
        assert set(first) == {"a.in", "a.weight", "b.in", "b.weight"}
        for site in first:
            assert (first[site].scale == second[site].scale).all()
            assert (first[site].zero_point == second[site].zero_point).all()
        assert float(given.scale) == float(same.scale) == pytest.approx(9.0 / 15)


def test_scales_of_either_shape_load() -> None:
    state = copy.deepcopy(make_model().state_dict())
    single = [key for key in state if key.endswith((".scale", ".offset"))]
    assert {tuple(state[key].shape) for key in single} == {(1,)}
    for key in single:
        state[key] = 2 * state[key].reshape(())
    other = make_model()
    other.load_state_dict(state)
    for key in single:
        assert torch.equal(other.state_dict()[key], state[key].reshape(1))


def test_a_compiled_model_computes_and_learns_the_same() -> None:
    """Without a graph break."""
    eager, other = make_model(), make_model()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(make_batch(1)), eager(make_batch(1)))
    train(eager, eager, (1, 2))
    train(other, compiled, (1, 2))
    compare(eager, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_in_float32(dtype: torch.dtype) -> None:
    model, plain = make_model(), make_model()
    with torch.autocast("cpu", dtype):
        answers = model(make_batch(1))
    assert answers.dtype == dtype
    F.cross_entropy(answers.float(), torch.arange(6) % 3).backward()
    for found in quantizers_of(model):
        for slot in found.learned if found.active else ():
            assert getattr(found, slot).grad.dtype == torch.float32
            assert getattr(found, slot).grad.isfinite().all()
    torch.testing.assert_close(answers.float(), plain(make_batch(1)), rtol=0.05, atol=0.05)


def test_averaged_weights_and_scales_are_a_model_of_their_own() -> None:
    model = make_model()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    start = copy.deepcopy(model)
    average.update_parameters(model)
    train(model, model, (1, 2))
    average.update_parameters(model)
    for mean, first, last in zip(average.module.parameters(), start.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mean, (first + last) / 2)
    average.module.freeze()
    assert average.module(make_batch(1)).isfinite().all()
    assert model.training


class Recomputed(nn.Module):
    """Layers one by one in a forward that cannot be traced, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head, self.recompute = nn.Linear(8, 3), True

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("NaN")
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def test_recomputed_activations_have_the_same_gradients() -> None:
    for inside in (False, True):
        plain, other = make_model(inside), make_model(inside)
        plain.model.recompute = False
        assert plain.traced is not inside
        F.cross_entropy(plain(make_batch(1)), torch.arange(6) % 3).backward()
        answers = other(make_batch(1)) if inside else checkpoint(other, make_batch(1), use_reentrant=False)
        F.cross_entropy(answers, torch.arange(6) % 3).backward()
        for mine, theirs in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
