"""QuantModel: its states and switches, copies and state dicts, float checkpoints, its diagram, and errors by layer."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.errors import CalibrationError, ConfigError, DataError, PlanError
from onnxq.evaluation.accumulator import measure_error
from onnxq.sites import Role
from tests.torch.nets import Around, Branching, Dense, Encoder, Mobile, Network, ResNet, calibrate, images, settled
from tests.torch.quant_model.kit import W4A4, calibrated, make_seeded, model
from torch_frontend.quant_model import Follower, PartialStateWarning, QuantModel, State


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


def test_nothing_is_quantized_but_what_is_switched_on() -> None:
    made, x = calibrated(), images()
    plain = settled(make_seeded(ResNet))(x)
    torch.testing.assert_close(made(x), plain, rtol=1e-4, atol=1e-5)
    for weights, activations in ((True, True), (True, False), (False, True)):
        made.set_quant(weights, activations)
        for q in made.quantizers.values():
            assert q.enabled is (weights if q.role is Role.WEIGHT else activations)
        assert not torch.allclose(made(x), plain, rtol=1e-4, atol=1e-5)
    made.set_quant(False, False)
    torch.testing.assert_close(made(x), plain, rtol=1e-4, atol=1e-5)


def test_disable_holds_whatever_the_switches_say_and_enable_undoes_it() -> None:
    made = calibrated()
    assert set(made.disable("layer1.0.*", "too sensitive")) >= {"layer1.0.relu.out", "layer1.0.conv1.weight"}
    made.set_quant()
    assert not made.quantizers["layer1.0.conv1.weight"].active
    assert "disabled: by hand: too sensitive" in repr(made.quantizers["layer1.0.conv1.weight"])
    made.enable("layer1.0.conv*.weight")
    assert made.quantizers["layer1.0.conv1.weight"].active
    assert not made.quantizers["layer1.0.relu.out"].active
    with pytest.raises(ConfigError, match="did you mean"):
        made.disable("fc.wieght")


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


@pytest.mark.parametrize(
    ("net", "x", "target"),
    [
        (ResNet, images(), "ort"),
        (Dense, images(), "virtual"),
        (Around, torch.ones(3, 16), "virtual"),
        (Branching, torch.ones(3, 16), "ort"),
    ],
)
def test_copies_pickles_and_state_dicts_compute_the_same(net: type[nn.Module], x: Tensor, target: str) -> None:
    config = {"target": target, "torch": {"weights": {"quantizer": "lsq"}}}
    made = calibrate(model(config, net), x).set_quant()
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
        inside = list(other.quantizers.values())
        assert all(any(q.leader is one for one in inside) for q in inside if isinstance(q, Follower))
        other.set_quant(False, False)
    assert torch.equal(made(x), expected)


def test_the_diagram_shows_every_layer_and_every_quantizer() -> None:
    made = calibrated()
    text = made.mermaid()
    assert text.startswith("graph TD\n")
    for site, quantizer in made.quantizers.items():
        assert quantizer.role is Role.WEIGHT or f"{site} uint4" in text
    assert "weight int4 symmetric" in text
    assert "off: conv and relu run as one kernel" in text
    assert "Linear" in QuantModel(Branching(), W4A4).mermaid()


def test_isolated_error_is_that_of_the_layer_alone() -> None:
    made, x = calibrated().set_quant(), images(2, seed=5)
    found = made.quantization_error([x], mode="isolated")
    layer = made.model.get_submodule("stem")
    with torch.no_grad():
        wanted = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)
        got = layer(made.quantizers["input:x"](x))
    assert found["stem"] == pytest.approx(measure_error(wanted.numpy(), got.numpy()).sqnr_db, rel=1e-6)
    assert "output" not in found
    assert list(found)[-1] == "fc"


def test_cumulative_error_grows_and_ends_at_the_output() -> None:
    made, x = calibrated().set_quant(), images(2, seed=5)
    alone, together = (made.quantization_error([x], mode=mode) for mode in ("isolated", "cumulative"))
    assert together["layer1.1.conv2"] < alone["layer1.1.conv2"]
    made.set_quant(False, False)
    plain = made(x)
    made.set_quant()
    wanted = measure_error(plain.detach().numpy(), made(x).detach().numpy()).sqnr_db
    assert together["output"] == pytest.approx(wanted, rel=1e-6)
    assert together["fc"] == pytest.approx(wanted, rel=1e-6)


def test_metrics_do_not_depend_on_how_data_are_cut_and_may_be_the_users_own() -> None:
    made, x = calibrated().set_quant(), images(4, seed=5)
    for metric in ("mse", "cosine", "max_abs"):
        parts = made.quantization_error([x[:3], x[3:]], metric)
        assert made.quantization_error(x, metric) == pytest.approx(parts, rel=1e-4), metric
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
    made = calibrate(model(W4A4, Branching), x).set_quant()
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


def make_trained(net: Callable[[], nn.Module]) -> nn.Module:
    """A network with other numbers than the one that is converted."""
    torch.manual_seed(7)
    made = settled(net())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.1).add_(0.01)
    return made


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    ("net", "x"),
    [(ResNet, images()), (Mobile, images()), (Encoder, torch.arange(12).reshape(2, 6)), (Branching, torch.ones(2, 16))],
)
def test_a_float_checkpoint_loads_by_its_own_names(net: type[nn.Module], x: torch.Tensor, fold: bool) -> None:
    """Batch norms and all; what the converted model computes in float is what the checkpoint computes."""
    trained = make_trained(net)
    made = model({**W4A4, "torch": {"fuse_bn": fold}}, net)
    assert not torch.allclose(made(x), trained(x), atol=1e-4)
    made.load_state_dict(trained.state_dict())
    torch.testing.assert_close(made(x), trained(x))


def make_outer() -> nn.Module:
    parts = {"model": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 2)}
    return Network(lambda m, x: m.head(m.model(x)), **parts)


def test_a_part_of_the_network_may_be_called_model() -> None:
    trained, made, x = make_trained(make_outer), model(net=make_outer), torch.randn(3, 4)
    made.load_state_dict(trained.state_dict())
    torch.testing.assert_close(made(x), trained(x))
    model(net=make_outer).load_state_dict(copy.deepcopy(made.state_dict()))


def test_a_checkpoint_loads_inside_another_module() -> None:
    trained, holder = make_trained(ResNet), nn.Sequential(model())
    holder.load_state_dict({f"0.{name}": value for name, value in trained.state_dict().items()})
    torch.testing.assert_close(holder(images()), trained(images()))


def test_one_name_of_tied_weights_is_enough() -> None:
    trained = make_trained(Encoder)
    state = {name: value for name, value in trained.state_dict().items() if name != "head.weight"}
    made, ids = model(net=Encoder), torch.arange(12).reshape(2, 6)
    made.load_state_dict(state)
    torch.testing.assert_close(made(ids), trained(ids))


def test_whatever_is_not_loaded_is_said() -> None:
    state, made = make_trained(ResNet).state_dict(), model()
    del state["fc.bias"], state["layer1.1.bn2.running_var"]
    state["aux.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"bn2\.running_var") as caught:
        made.load_state_dict(dict(state))
    assert all(name in str(caught.value) for name in ("fc.bias", "aux.weight"))
    with pytest.warns(PartialStateWarning, match=r"lacks .*bn2\.running_var.*fc\.bias.* has no aux\.weight"):
        made.load_state_dict(dict(state), strict=False)
    with pytest.warns(PartialStateWarning, match=r"has no module\.stem\.weight"):
        made.load_state_dict({"module.stem.weight": torch.zeros(1)}, strict=False)


def test_parts_that_the_forward_does_not_use_are_named() -> None:
    def make() -> nn.Module:
        return Network(lambda m, x: m.used(x), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))

    with pytest.warns(PartialStateWarning, match=r"does not read unused\.bias, unused\.weight"):
        model(net=make).load_state_dict(make_trained(make).state_dict())


def test_scales_from_before_are_said_and_kept() -> None:
    made = calibrated()
    before = {site: q.qparams() for site, q in made.quantizers.items() if q.calibrated}
    with pytest.warns(PartialStateWarning, match="scales are from before"):
        made.load_state_dict(make_trained(ResNet).state_dict())
    assert {site: q.qparams() for site, q in made.quantizers.items() if q.calibrated} == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.load_state_dict(copy.deepcopy(made.state_dict()))


@pytest.mark.parametrize("other", [{"bits": 8}, {"granularity": "channel"}, {"granularity": "tensor"}])
def test_scales_of_other_bits_or_another_granularity_are_refused(other: dict[str, Any]) -> None:
    own = {"bits": 4, "granularity": "tensor" if other == {"granularity": "channel"} else "channel"}
    first, second = (calibrate(model({**W4A4, "weights": spec}), images()) for spec in (own, {**own, **other}))
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(PlanError, match=r"stem\.weight: .* for 4 bits, Per.* for .*\[Q407\]"):
        second.load_state_dict({key: 0 * value if "." in key else value for key, value in first.state_dict().items()})
    assert all(torch.equal(before[key], value) for key, value in second.state_dict().items())


def test_after_batchnorm_tuning_a_checkpoint_folds_its_own_statistics() -> None:
    made = model({**W4A4, "weights": {"bits": 4, "granularity": "channel"}, "torch": {"fuse_bn": False}})
    calibrate(made, images())
    with made.batchnorm_tuning():
        made(images())
    trained = make_trained(ResNet)
    with pytest.warns(PartialStateWarning, match="scales are from before"):
        made.load_state_dict(trained.state_dict())
    made.set_quant(False, False)
    torch.testing.assert_close(made(images()), trained(images()))
