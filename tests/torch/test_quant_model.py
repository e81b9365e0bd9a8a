"""A QuantModel's life: steps in order, numbers that are right, switches that hold, states that travel."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from onnxq.errors import CalibrationError, ConfigError, DataError, PlanError
from onnxq.metrics import sqnr_db
from onnxq.sites import Role
from tests.torch.nets import Around, Branching, Dense, Encoder, ResNet, images, settled
from torch_frontend.quant_model import QuantModel, State

W4A4: dict[str, Any] = {"target": "virtual", "weights": {"bits": 4}, "activations": {"bits": 4}}


def model(config: dict[str, Any] | None = None, net: type[nn.Module] = ResNet, **how: Any) -> QuantModel:
    torch.manual_seed(0)
    return QuantModel(settled(net()), config or W4A4, **how)


def calibrated(config: dict[str, Any] | None = None, **how: Any) -> QuantModel:
    made = model(config).prepare_calibration()
    for seed in (0, 1):
        made(images(seed=seed))
    return made.calc_qparams(**how)


# -- lifecycle -----------------------------------------------------------------------------------------------------


def test_the_states_follow_one_another() -> None:
    made = model()
    assert made.state is State.FLOAT
    assert made.prepare_calibration().state is State.OBSERVING
    made(images())
    assert made.calc_qparams().state is State.CALIBRATED
    assert made.set_quant().state is State.QUANTIZED
    assert made.init_qat().state is State.QUANTIZED
    assert made.training
    assert made.freeze().state is State.FROZEN
    assert not made.training
    made.mark_exported()
    assert made.state is State.EXPORTED


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ((), "calc_qparams"),
        ((), "set_quant"),
        ((), "init_qat"),
        ((), "freeze"),
        ((), "begin_export"),
        (("prepare_calibration",), "set_quant"),
        (("prepare_calibration", "run", "calc_qparams"), "calc_qparams"),
        (("prepare_calibration", "run", "calc_qparams", "freeze"), "prepare_calibration"),
        (("prepare_calibration", "run", "calc_qparams", "freeze"), "init_qat"),
        (("prepare_calibration", "run", "calc_qparams", "freeze", "mark_exported"), "init_qat"),
    ],
)
def test_a_step_out_of_turn_says_what_comes_first(steps: tuple[str, ...], wrong: str) -> None:
    made = model()
    for step in steps:
        made(images()) if step == "run" else getattr(made, step)()
    with pytest.raises(PlanError, match=r"the model is \w+ \[Q409\]\n  fix: "):
        getattr(made, wrong)()


def test_nothing_is_quantized_before_it_is_switched_on() -> None:
    made, x = calibrated(), images()
    plain = settled(_seeded(ResNet))
    torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-5)
    on = made.set_quant()(x)
    assert not torch.allclose(on, plain(x), rtol=1e-4, atol=1e-5)
    made.set_quant(False, False)
    torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-5)


def _seeded(net: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net()


def test_weights_and_activations_switch_apart() -> None:
    made = calibrated()
    for weights, activations in ((True, False), (False, True)):
        made.set_quant(weights, activations)
        for q in made.quantizers.values():
            assert q.enabled is (weights if q.role is Role.WEIGHT else activations)


def test_calibration_that_reaches_nothing_names_the_sites() -> None:
    made = model().prepare_calibration()
    with pytest.raises(CalibrationError, match=r"input:x, max_pool2d\.out.*no batch reached it"):
        made.calc_qparams()


def test_nan_while_calibrating_names_the_site() -> None:
    made = model().prepare_calibration()
    with pytest.raises(CalibrationError, match=r"^input:x: 1 NaN"):
        made(images().index_fill(0, torch.tensor([0]), 0.0).put_(torch.tensor([3]), torch.tensor([float("nan")])))


def test_a_scale_that_became_nan_in_training_names_the_sites() -> None:
    made = calibrated({**W4A4, "torch": {"weights": {"quantizer": "lsq"}}}).init_qat()
    made.quantizers["fc.weight"].scale.data.fill_(float("nan"))
    made.quantizers["stem.weight"].scale.data[0] = float("inf")
    for step in (made.check, made.freeze, made.begin_export):
        with pytest.raises(CalibrationError, match=r"stem\.weight.*fc\.weight"):
            step()


def test_training_moves_weights_and_learned_scales() -> None:
    made = calibrated({**W4A4, "torch": {"weights": {"quantizer": "lsq"}, "activations": {"quantizer": "lsq"}}})
    made.init_qat()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    target, losses = torch.tensor([0, 1, 2, 3]), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(made(images()), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert {"model.stem.weight", "model.stem.weight_quantizer.scale", "model.quantizers.input:x.scale"} <= moved


def test_a_compiled_model_computes_the_same() -> None:
    made, x = calibrated().set_quant().eval(), images()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), made(x), rtol=1e-5, atol=1e-5)


# -- numbers -------------------------------------------------------------------------------------------------------


def test_ranges_are_those_of_all_batches_and_weights_those_of_their_tensors() -> None:
    made = calibrated()
    x = torch.cat([images(seed=0), images(seed=1)]).numpy()
    found = made.quantizers["input:x"].qparams()
    np.testing.assert_allclose(found.scale, (x.max() - x.min()) / 15, rtol=1e-6)
    weight = made.weights()["fc.weight"].detach().abs().amax(1).numpy()
    np.testing.assert_allclose(made.quantizers["fc.weight"].qparams().scale, weight / 7, rtol=1e-6)


@pytest.mark.parametrize("top", [6.0, 0.7, 3.3])
def test_levels_stay_inside_a_fused_clip_so_that_the_engine_drops_it(top: float) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Hardtanh(0.0, top), nn.Conv2d(8, 8, 3)).eval()
    made, x = QuantModel(net, target="ort").prepare_calibration(), 40.0 * torch.randn(2, 8, 8, 8)
    made(x)
    made.calc_qparams()
    low, high = made.quantizers["1.out"].dequantized_range()
    assert low == 0.0
    assert float(np.nextafter(np.float32(top), np.float32(0))) * 0.999 < high <= np.float32(top)


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def _by_hand(net: nn.Module, x: Tensor, weights: bool, activations: bool) -> dict[str, Tensor]:
    """Scales of a chain, each on what the quantized layers before it give."""
    found: dict[str, Tensor] = {}

    def rounded(t: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        return (t / scale).round().clamp(low, high) * scale

    for name, site in (("a", "input:x"), ("b", "a.out"), ("c", "b.out")):
        layer = getattr(net, name)
        found[site] = x.abs().max() / 3
        x = rounded(x, found[site], -4, 3) if activations else x
        scale = layer.weight.abs().amax(1, keepdim=True) / 3
        x = x @ (rounded(layer.weight, scale, -4, 3) if weights else layer.weight).T
    return found


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("activations", [False, True])
def test_asym_feeds_each_site_what_its_quantized_predecessors_give(weights: bool, activations: bool) -> None:
    torch.manual_seed(0)
    net, x = _Chain(), torch.randn(16, 6)
    narrow = {"bits": 3, "scheme": "symmetric"}
    made = QuantModel(net, {"target": "virtual", "weights": narrow, "activations": narrow}).prepare_calibration()
    made(x[:10])
    made(x[10:])
    made.calc_qparams(asym=True, w_quant=weights, a_quant=activations)
    with torch.no_grad():
        wanted = _by_hand(net, x, weights, activations)
    for site, scale in wanted.items():
        torch.testing.assert_close(made.quantizers[site].scale, scale, rtol=1e-5, atol=0)
    plain = _by_hand(net, x, False, False)
    assert torch.allclose(wanted["b.out"], plain["b.out"], rtol=1e-6) is not (weights or activations)


def test_asym_without_kept_batches_says_so() -> None:
    made = model().prepare_calibration(keep_inputs=False)
    made(images())
    with pytest.raises(PlanError, match="no batch was kept"):
        made.calc_qparams(asym=True)


def test_kept_batches_are_not_changed_by_their_owner() -> None:
    made, x = model().prepare_calibration(), images()
    made(x)
    x.zero_()
    made.calc_qparams(asym=True)
    assert made.quantizers["input:x"].scale > 0.1


def test_asym_works_around_what_cannot_be_traced() -> None:
    made, x = QuantModel(Around().eval(), W4A4), torch.randn(8, 16)
    made.prepare_calibration()
    made(x)
    made.calc_qparams(asym=True).set_quant()
    assert made(x).isfinite().all()
    untraced = QuantModel(Branching(), W4A4).prepare_calibration()
    untraced(x)
    with pytest.raises(PlanError, match="not traced"):
        untraced.calc_qparams(asym=True)


# -- switches ------------------------------------------------------------------------------------------------------


def test_disable_holds_whatever_the_switches_say_and_enable_undoes_it() -> None:
    made = calibrated()
    assert set(made.disable("layer1.0.*", "too sensitive")) >= {"layer1.0.relu.out", "layer1.0.conv1.weight"}
    made.set_quant()
    assert not made.quantizers["layer1.0.conv1.weight"].active
    assert "disabled: by hand: too sensitive" in repr(made.quantizers["layer1.0.conv1.weight"])
    made.enable("layer1.0.conv*.weight")
    assert made.quantizers["layer1.0.conv1.weight"].active
    assert not made.quantizers["layer1.0.relu.out"].active


def test_a_pass_decision_outlives_every_switch_but_force() -> None:
    made = calibrated().set_quant()
    assert not made.quantizers["stem.out"].active
    made.enable("*")
    assert not made.quantizers["stem.out"].active
    with pytest.raises(PlanError, match="one kernel"):
        made.enable("stem.out")
    made.enable("stem.out", force=True)
    assert made.quantizers["stem.out"].active
    with pytest.raises(CalibrationError, match=r"stem\.out"):
        made.check()


def test_a_pattern_without_a_site_is_a_typo() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        calibrated().disable("fc.wieght")


# -- states that travel --------------------------------------------------------------------------------------------

NETS = {"resnet": (ResNet, images()), "dense": (Dense, images()), "around": (Around, torch.ones(3, 16)),
        "branching": (Branching, torch.ones(3, 16))}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("target", ["ort", "virtual"])
def test_copies_pickles_and_state_dicts_compute_the_same(name: str, target: str) -> None:
    net, x = NETS[name]
    config = {"target": target, "torch": {"weights": {"quantizer": "lsq"}}}
    made = model(config, net).prepare_calibration()
    made(x)
    made.calc_qparams().set_quant()
    site = next(s for s, q in made.quantizers.items() if q.role is Role.WEIGHT)
    made.disable(site)
    expected = made(x)
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    loaded = model(config, net)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), loaded):
        assert torch.equal(other(x), expected)
        assert other.state is State.QUANTIZED
        assert other.quantizers.keys() == made.quantizers.keys()
        assert not other.quantizers[site].active
        assert {q.group for q in other.quantizers.values()} == {q.group for q in made.quantizers.values()}
        other.set_quant(False, False)
    assert torch.equal(made(x), expected)


def test_a_pickle_can_be_calibrated_again() -> None:
    made = pickle.loads(pickle.dumps(model())).prepare_calibration()
    made(images())
    made.calc_qparams(asym=True).set_quant()
    again = calibrated().set_quant()
    assert made.quantization_error(images()).keys() == again.quantization_error(images()).keys()


# -- error by layer ------------------------------------------------------------------------------------------------


def test_isolated_error_is_that_of_the_layer_alone() -> None:
    made, x = calibrated().set_quant(), images(2, seed=5)
    found = made.quantization_error([x], mode="isolated")
    layer = made.model.get_submodule("stem")
    with torch.no_grad():
        wanted = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)
        got = layer(made.quantizers["input:x"](x))
    assert found["stem"] == pytest.approx(sqnr_db(wanted.numpy(), got.numpy()), rel=1e-6)
    assert "output" not in found
    assert list(found)[-1] == "fc"


def test_cumulative_error_grows_and_ends_at_the_output() -> None:
    made, x = calibrated().set_quant(), images(2, seed=5)
    alone, together = (made.quantization_error([x], mode=mode) for mode in ("isolated", "cumulative"))
    assert together["layer1.1.conv2"] < alone["layer1.1.conv2"]
    made.set_quant(False, False)
    plain = made(x)
    made.set_quant()
    wanted = sqnr_db(plain.detach().numpy(), made(x).detach().numpy())
    assert together["output"] == pytest.approx(wanted, rel=1e-6)
    assert together["fc"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("metric", ["mse", "cosine", "max_abs"])
def test_metrics_do_not_depend_on_how_data_are_cut(metric: str) -> None:
    made, x = calibrated().set_quant(), images(4, seed=5)
    whole = made.quantization_error(x, metric)
    parts = made.quantization_error([x[:3], x[3:]], metric)
    assert whole == pytest.approx(parts, rel=1e-4)


def test_a_metric_of_the_users_own_gets_arrays() -> None:
    made = calibrated().set_quant()
    found = made.quantization_error(images(), lambda a, b: float(np.abs(a - b).sum()))
    assert all(value > 0 for value in found.values())


def test_measuring_changes_nothing() -> None:
    made, x = calibrated().init_qat(), images()
    before = copy.deepcopy(made.state_dict())
    made.quantization_error(x, mode="cumulative")
    assert made.training
    after = made.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if isinstance(before[k], Tensor))
    assert all(q.enabled for q in made.quantizers.values())


def test_an_untraced_model_is_measured_by_its_layers() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    made = model(W4A4, Branching).prepare_calibration()
    made(x)
    made.calc_qparams().set_quant()
    alone, together = (made.quantization_error(x, mode=mode) for mode in ("isolated", "cumulative"))
    assert list(alone) == ["first", "second", "third"]
    assert list(together) == ["first", "second", "third", "output"]
    assert together["first"] == pytest.approx(alone["first"])
    assert together["third"] < alone["third"]


def test_wrong_measurements_say_what_is_wrong() -> None:
    made = calibrated()
    with pytest.raises(PlanError, match="no quantizer is on"):
        made.quantization_error(images())
    made.set_quant()
    with pytest.raises(ConfigError, match="sqnr"):
        made.quantization_error(images(), "snr")
    with pytest.raises(ConfigError, match="isolated or cumulative"):
        made.quantization_error(images(), mode="both")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no batch"):
        made.quantization_error([])


# -- batch norms ---------------------------------------------------------------------------------------------------


def unfused(**weights: Any) -> QuantModel:
    made = model({**W4A4, "weights": {"bits": 4, **weights}, "torch": {"fuse_bn": False}}).prepare_calibration()
    made(images())
    return made.calc_qparams()


def test_tuned_batch_norms_fold_into_their_layers_and_scales_follow() -> None:
    made, x = unfused(), images(8, seed=3)
    norms = {n: m for n, m in made.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    with torch.no_grad():
        norms["bn"].weight[0] = -0.7
    scales = {name: made.quantizers[f"{name}.weight"].scale.clone() for name in ("stem", "layer1.1.down.0")}
    with made.batchnorm_tuning():
        made(x[:4])
        made(x[4:])
        norm = copy.deepcopy(norms["bn"])
        unfolded = copy.deepcopy(made).eval()
    made.eval()
    torch.testing.assert_close(made(x), unfolded(x), rtol=1e-3, atol=1e-3)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules())
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    torch.testing.assert_close(made.quantizers["stem.weight"].scale, scales["stem"] * factor.abs().detach())
    assert [d.subject for d in made.decisions if d.rule == "batchnorm-tuning"] == list(norms)
    assert made.state is State.QUANTIZED


def test_tuned_statistics_are_the_mean_over_the_batches() -> None:
    made, x = unfused(), images(8, seed=3)
    with made.batchnorm_tuning():
        made(x[:4])
        made(x[4:])
        norm = made.model.get_submodule("bn")
        stem = made.model.get_submodule("stem")
        held = norm.running_mean.clone()
        outs = [stem(made.quantizers["input:x"](part)).mean((0, 2, 3)) for part in (x[:4], x[4:])]
    torch.testing.assert_close(held, sum(outs) / 2, rtol=1e-4, atol=1e-5)


def test_tuning_mends_statistics_that_are_off() -> None:
    net, x = _seeded(ResNet), images(8, seed=3)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net(x)
    wanted = net.eval()(x)
    net.bn.running_mean.add_(1.0)
    made = QuantModel(net, {"target": "virtual", "torch": {"fuse_bn": False}}).prepare_calibration()
    made(x)
    made.calc_qparams().set_quant()
    before = (made(x) - wanted).square().mean()
    with made.batchnorm_tuning():
        made(x)
    assert (made.eval()(x) - wanted).square().mean() < 0.1 * before


def test_tuning_refuses_weights_with_one_scale_and_names_the_layer() -> None:
    made = unfused(granularity="tensor")
    with pytest.raises(PlanError, match=r"^stem: its weight has one scale"), made.batchnorm_tuning():
        pass


def test_tuning_refuses_a_model_without_batch_norms() -> None:
    with pytest.raises(PlanError, match="fuse_bn: false"), calibrated().batchnorm_tuning():
        pass


# -- looking -------------------------------------------------------------------------------------------------------


def test_the_repr_shows_bits_scheme_and_numbers_when_on() -> None:
    made = calibrated().set_quant()
    text = repr(made.quantizers["input:x"])
    for word in ("4 bits", "asymmetric", "scale=", "zero_point="):
        assert word in text
    assert "scale=" not in repr(model().quantizers["input:x"])


def test_the_diagram_shows_every_layer_and_every_quantizer() -> None:
    made = calibrated()
    text = made.mermaid()
    assert text.startswith("graph TD\n")
    for site, quantizer in made.quantizers.items():
        assert quantizer.role is Role.WEIGHT or f"{site} uint4" in text
    assert "weight int4 symmetric" in text
    assert "off: conv and relu run as one kernel" in text
    assert "Linear" in QuantModel(Branching(), W4A4).mermaid()


# -- transformers --------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"norm_first": True}, {"activation": "gelu"}, {"dropout": 0.1}, {"batch_first": False}]
)
def test_torchs_own_encoder_is_taken_apart_and_quantized(how: dict[str, Any], padded: bool) -> None:
    torch.manual_seed(0)
    net = Encoder(**how).eval()
    if not how.get("batch_first", True):
        net.position = nn.Parameter(net.position.detach()[:, None][:2])
        padded = False
    inputs = (TOKENS, PADDING) if padded else (TOKENS,)
    made = QuantModel(net, {"target": "virtual"}, example_inputs=inputs)
    torch.testing.assert_close(made(*inputs), net(*inputs), rtol=1e-5, atol=1e-5)
    assert {r.rule for r in made.refusals} <= {"softmax", "two-operands"}
    assert "encoder.layers.0.self_attn.in_proj_weight" in made.quantizers
    made.prepare_calibration()
    made(*inputs)
    made.calc_qparams(asym=True).set_quant()
    assert sqnr_db(net(*inputs).detach().numpy(), made(*inputs).detach().numpy()) > 20
    made.init_qat()(*inputs).square().sum().backward()
    grads = {name: p.grad for name, p in made.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())


def test_cross_attention_reads_one_weight_in_three_parts() -> None:
    torch.manual_seed(0)
    net, q, kv = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    made = QuantModel(net, target="virtual", example_inputs=(q, kv, kv))
    for got, wanted in zip(made(q, kv, kv), net(q, kv, kv), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert [s for s, one in made.quantizers.items() if one.role is Role.WEIGHT] == ["in_proj_weight", "out_proj.weight"]


def test_encoder_and_decoder_together() -> None:
    torch.manual_seed(0)
    net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    given = {"src": torch.randn(2, 4, 8), "tgt": torch.randn(2, 5, 8), "tgt_mask": mask}
    made = QuantModel(net, target="virtual", example_inputs=given)
    torch.testing.assert_close(made(**given), net(**given), rtol=1e-5, atol=1e-5)
    place = "decoder.layers.0.self_attn"
    assert [(r.subject, r.rule) for r in made.refusals] == [
        (f"{place}.add", "two-operands"),
        (f"{place}.softmax", "softmax"),
    ]
    made.prepare_calibration()
    made(**given)
    made.calc_qparams().set_quant()
    assert sqnr_db(net(**given).detach().numpy(), made(**given).detach().numpy()) > 20


def test_attention_with_learned_extra_keys_stays_a_leaf_and_says_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    net, x = Net().eval(), torch.randn(2, 3, 8)
    made = QuantModel(net, target="virtual", example_inputs=x)
    assert [r.subject for r in made.refusals] == ["attention"]
    assert torch.equal(made(x), net(x))
