"""Learned roundings: lower error, the same bits for the same seed, and nothing else of the model touched."""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from onnxq.errors import CalibrationError, ConfigError, DataError, ModelError, PlanError
from onnxq.sites import Role
from tests.torch.digits import Residuals
from tests.torch.nets import Network, calibrate
from tests.torch.reconstruct.kit import QLinear, plain_net, rows, values
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import AdaRound, Quantizer, quantizers_of
from torch_frontend.reconstruct import LearningProgress, Settings, reconstruct
from torch_frontend.reconstruct.cache import Record, UnitCache

QUICK = Settings(iterations=80, batch=16, samples=64, lr=0.03)
CONFIG = {"target": "virtual", "weights": {"bits": 3, "granularity": "channel"}, "activations": {"bits": 8}}


def images(count: int = 64, side: int = 8) -> torch.Tensor:
    """Smooth ones with a little noise."""
    smooth = nn.functional.interpolate(values(count, 1, 3, 3, seed=side), (side, side), mode="bilinear")
    return smooth + 0.05 * values(count, 1, side, side)


def quant_model(net: nn.Module | None = None, config: object = CONFIG) -> QuantModel:
    torch.manual_seed(1)
    model = QuantModel((net or Residuals()).eval(), config, example_inputs=images(2)).eval()
    return calibrate(model, images())


def output_error(model: nn.Module, x: torch.Tensor) -> float:
    every = quantizers_of(model)
    with torch.no_grad():
        outputs = []
        for on in (False, True):
            for found in every:
                found.enabled = on
            outputs.append(model(x))
    return float((outputs[0] - outputs[1]).square().mean())


@pytest.mark.parametrize(("method", "blocks"), [("adaround", None), ("brecq", ["0", "2"]), ("brecq", [""])])
def test_any_module_with_quantizers(method: str, blocks: list[str] | None) -> None:
    net = plain_net()
    before = output_error(net, rows())
    weights = {name: p.clone() for name, p in net.named_parameters() if name.endswith(("0.weight", "2.weight"))}
    result = reconstruct(net, rows().split(10), method, blocks=blocks, settings=QUICK)
    assert output_error(net, rows()) < 0.5 * before
    assert {site for unit in result.units for site in unit.sites} == {"a.weight", "b.weight"}
    assert all(unit.kept and unit.after < unit.before and unit.samples == 64 for unit in result.units)
    for name, weight in weights.items():
        assert torch.equal(net.get_parameter(name), weight)


def test_a_tensor_is_one_batch() -> None:
    units = reconstruct(quant_model(), images(16), settings=QUICK).units
    assert {unit.samples for unit in units} == {16}


@pytest.mark.parametrize(("method", "qdrop"), [("adaround", 0.0), ("brecq", 0.0), ("brecq", 0.5)])
def test_quant_model(method: str, qdrop: float) -> None:
    model = quant_model()
    x = images()
    before = output_error(model, x)
    model.set_quant(False, False)
    result = reconstruct(model, x.split(20), method, qdrop=qdrop, settings=QUICK)
    assert not any(found.enabled for found in model.quantizers.values())  # switches are as they were
    names = [unit.name for unit in result.units]
    if method == "adaround":
        assert names == ["stem", "layer1.conv1", "layer1.conv2", "layer2.conv1", "layer2.conv2", "fc"]
    else:
        assert names == ["stem", "layer1", "layer2", "fc"]
    assert not result.refusals
    assert output_error(model, x) < 0.7 * before
    assert all(isinstance(q, AdaRound) for q in model.quantizers.values() if q.role is Role.WEIGHT)
    again = quant_model(config={**CONFIG, "torch": {"weights": {"quantizer": "adaround"}}})
    again.load_state_dict(model.state_dict())
    again.set_quant()
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_nothing_else_is_touched() -> None:
    net = plain_net("lsq", "lsq").train()
    net[1].eval()
    net[0].bias.requires_grad_(False)
    state = {name: p.clone() for name, p in net.named_parameters() if "quantizer" not in name}
    reconstruct(net, [rows()], "brecq", blocks=["0", "2"], qdrop=0.3, settings=QUICK)
    assert [module.training for module in net] == [True, False, True]
    assert not net[0].bias.requires_grad
    assert net[2].bias.requires_grad
    for name, p in state.items():
        assert torch.equal(net.get_parameter(name), p)
        assert net.get_parameter(name).grad is None
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in net.modules())
    assert torch.is_grad_enabled()
    net(values(3, 12)).sum().backward()  # training can go on from here
    assert net[0].weight.grad.abs().sum() > 0


def test_a_second_run_starts_anew() -> None:
    net = plain_net()
    first = reconstruct(net, [rows()], settings=QUICK)
    assert first == reconstruct(net, [rows()], settings=QUICK)


def test_progress() -> None:
    told: list[LearningProgress] = []
    reconstruct(plain_net(), [rows()], settings=Settings(iterations=230, samples=32), progress=told.append)
    assert [(p.unit, p.index, p.units, p.iteration, p.iterations) for p in told] == [
        (unit, k, 2, step, 230) for k, unit in enumerate(("0", "2")) for step in (1, 101, 201, 230)
    ]
    assert all(p.loss >= 0 for p in told)


def test_only_so_many_samples_are_used_and_the_rest_is_not_read() -> None:
    def endless():
        yield values(40, 12)
        yield values(40, 12, seed=1)
        raise AssertionError("read too far")

    done = reconstruct(plain_net(), endless(), settings=Settings(iterations=5, samples=50))
    assert [unit.samples for unit in done.units] == [50, 50]


def test_images_of_several_sizes() -> None:
    model = quant_model(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)))
    data = [images(16, side) for side in (6, 8, 10)]
    assert all(unit.kept for unit in reconstruct(model, data, settings=QUICK).units)


def test_errors_name_what_is_wrong() -> None:
    net, x = plain_net(), [rows(8)]
    with pytest.raises(ConfigError, match=r"method 'adaroud'.*\n.*adaround"):
        reconstruct(net, x, "adaroud")
    with pytest.raises(ConfigError, match="qdrop=1"):
        reconstruct(net, x, qdrop=1.0)
    with pytest.raises(ConfigError, match="no graph to find blocks in"):
        reconstruct(net, x, "brecq")
    with pytest.raises(ModelError, match=r"layer7: is no module.*\[Q124\]"):
        reconstruct(net, x, blocks=["layer7"])
    with pytest.raises(DataError, match="no samples"):
        reconstruct(net, [])
    with pytest.raises(ConfigError, match="iterations=0"):
        Settings(iterations=0)
    with pytest.raises(ConfigError, match="warm_up=1"):
        Settings(warm_up=1.0)
    with pytest.raises(CalibrationError, match="can learn to round"):
        reconstruct(nn.Linear(2, 2), x)
    blank = nn.Sequential(QLinear(12, 4, "a"))
    with pytest.raises(CalibrationError, match=r"a\.weight: has no scale"):
        reconstruct(blank, x)
    with pytest.raises(PlanError, match="the model is float"):
        reconstruct(QuantModel(Residuals(), CONFIG), x)


def test_weights_that_do_not_round_to_nearest_are_refused_by_name() -> None:
    done = reconstruct(plain_net("dorefa", "uniform"), [rows()], settings=QUICK)
    assert [(r.subject, r.rule) for r in done.refusals] == [("a.weight", "rounding")]
    assert [unit.name for unit in done.units] == ["2"]


def test_what_a_pass_disabled_is_left_alone() -> None:
    net = plain_net()
    net[0].weight_quantizer.disabled_reason = "a test"
    assert [unit.sites for unit in reconstruct(net, [rows()], settings=QUICK).units] == [("b.weight",)]
    assert not isinstance(net[0].weight_quantizer, AdaRound)


def test_a_layer_used_twice_learns_once() -> None:
    twice = Network(lambda m, x: m.conv(torch.relu(m.conv(x))), conv=nn.Conv2d(1, 1, 3, padding=1))
    done = reconstruct(quant_model(twice), [images()], settings=QUICK)
    assert [unit.name for unit in done.units] == ["conv"]
    assert [(r.subject, r.rule) for r in done.refusals] == [("conv.weight", "shared")]


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
        assert len(cache.draw_samples(4, torch.Generator().manual_seed(0), mixed=False).target) == 4
        cache.add_record(Record((values(5, 3), torch.arange(1.0, 5.0)), (), values(5)))
        assert not cache.can_mix()
        with pytest.raises(DataError, match="without samples"):
            cache.add_record(Record((), (), torch.zeros(0, 3)))
