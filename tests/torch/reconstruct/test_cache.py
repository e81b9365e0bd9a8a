"""The cache of a unit: files beyond its limit, and draws of samples."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import DataError
from tests.torch.reconstruct.kit import plain_net, rows, values
from torch_frontend.quantizers import AdaRound, quantizers_of
from torch_frontend.reconstruct import Settings, reconstruct
from torch_frontend.reconstruct.cache import Record, UnitCache


def test_a_small_memory_spills_and_changes_nothing() -> None:
    results = []
    for limit in (1 << 30, 2000, 1):
        net = plain_net()
        settings = Settings(iterations=60, batch=8, samples=64, cache_bytes=limit)
        done = reconstruct(net, rows().split(10), qdrop=0.5, settings=settings)
        results.append([found.v for found in quantizers_of(net) if isinstance(found, AdaRound)])
        size = 4 * 64 * (12 + 12 + 16)
        assert done.units[0].spilled == {1 << 30: 0, 1: size}.get(limit, done.units[0].spilled)
        assert limit != 2000 or 0 < done.units[0].spilled < size
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_draws() -> None:
    with UnitCache(1 << 20) as cache:
        for seed in range(3):
            x = values(5, 3, seed=seed)
            cache.add_record(Record((x, torch.arange(4.0)), (), x.sum(1)))
        assert cache.can_mix()
        drawn = cache.draw_samples(15, torch.Generator().manual_seed(0), mixed=True)
        torch.testing.assert_close(drawn.inputs[0].sum(1), drawn.target)  # rows stay together
        assert drawn.target.unique().numel() == 15
        assert torch.equal(drawn.inputs[1], torch.arange(4.0))  # what has no samples comes whole
        few = cache.draw_samples(4, torch.Generator().manual_seed(0), mixed=False)
        assert len(few.target) == 4
        cache.add_record(Record((values(5, 3), torch.arange(1.0, 5.0)), (), values(5)))
        assert not cache.can_mix()
        with pytest.raises(DataError, match="without samples"):
            cache.add_record(Record((), (), torch.zeros(0, 3)))
