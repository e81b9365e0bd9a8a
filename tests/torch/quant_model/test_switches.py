"""Switches of quantizers: by kind, and for good by pattern."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.sites import Role
from tests.torch.nets import ResNet, images, settled
from tests.torch.quant_model.kit import calibrated, make_seeded


def test_nothing_is_quantized_before_it_is_switched_on() -> None:
    made, x = calibrated(), images()
    plain = settled(make_seeded(ResNet))
    torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-5)
    on = made.set_quant()(x)
    assert not torch.allclose(on, plain(x), rtol=1e-4, atol=1e-5)
    made.set_quant(False, False)
    torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-5)


def test_weights_and_activations_switch_apart() -> None:
    made = calibrated()
    for weights, activations in ((True, False), (False, True)):
        made.set_quant(weights, activations)
        for q in made.quantizers.values():
            assert q.enabled is (weights if q.role is Role.WEIGHT else activations)


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
