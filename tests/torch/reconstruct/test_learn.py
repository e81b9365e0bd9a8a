"""Learning of one unit: seeds, activation scales, QDrop, and restored roundings."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from tests.torch.reconstruct.kit import plain_net, rows
from torch_frontend.quantizers import AdaRound, Quantizer, quantizers_of
from torch_frontend.reconstruct import Settings, reconstruct


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    results = []
    for seed in (0, 0, 1):
        net = plain_net()
        settings = Settings(iterations=80, batch=8, samples=64, seed=seed, activation_lr=1e-3, lr=0.03)
        reconstruct(net, [rows()], qdrop=0.5, settings=settings)
        results.append(torch.cat([found.v.flatten() for found in quantizers_of(net) if isinstance(found, AdaRound)]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_activation_scales_learn_only_when_asked() -> None:
    for rate, moves in ((0.0, False), (1e-3, True)):
        net = plain_net()
        start = [net[0].seen.scale.clone(), net[2].seen.scale.clone()]
        reconstruct(net, [rows()], settings=Settings(iterations=40, samples=64, activation_lr=rate))
        for layer, scale in zip((net[0], net[2]), start, strict=True):
            assert torch.equal(layer.seen.scale, scale) != moves
            assert not layer.seen.scale.requires_grad


def test_what_does_not_help_is_put_back() -> None:
    net = plain_net()
    twin = copy.deepcopy(net)
    result = reconstruct(net, [rows()], settings=Settings(iterations=3, lr=500.0, samples=64))
    assert not any(unit.kept for unit in result.units)
    assert all(unit.before == unit.after for unit in result.units)
    with torch.no_grad():
        assert torch.equal(net(rows(5)), twin(rows(5)))


def test_qdrop_leaves_that_share_in_float() -> None:
    net = plain_net()
    shares = []

    def look(module: Quantizer, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            shares.append(float((output == given[0]).double().mean()))

    reconstruct_first = Settings(iterations=50, samples=64, batch=64)
    handles = []
    # Hooks run in order of registration: this one must come after the dropping, so it is put on when learning starts.
    reconstruct(
        net, [rows()], qdrop=0.25, settings=reconstruct_first,
        progress=lambda _: handles.append(net[0].seen.register_forward_hook(look)) if not handles else None,
    )  # fmt: skip
    assert len(shares) > 20
    assert sum(shares) / len(shares) == pytest.approx(0.25, abs=0.03)
