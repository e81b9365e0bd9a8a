"""First qparams: observers, streaming, and statistics of several ranks."""

import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq import numerics
from onnxq.errors import CalibrationError, ConfigError
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, QuantSpec
from tests.torch.quantizers.kit import ACTIVATIONS, UINT8, calibrated, weight
from torch_frontend.quantizers import create_quantizer


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_observing_streams_over_batches_and_does_not_quantize_before_numbers(name: str) -> None:
    x = weight(8, 5).abs()
    quantizer = create_quantizer(name, UINT8, site="relu.out")
    quantizer.observing = True
    for batch in x.split(3):
        assert quantizer(batch) is batch
    quantizer.observing = False
    quantizer.calc_qparams()
    whole = calibrated(name, UINT8, x, role=Role.ACTIVATION)
    assert np.array_equal(quantizer.qparams().scale, whole.qparams().scale)
    quantizer.calc_qparams()  # nothing new seen: nothing changes
    assert np.array_equal(quantizer.qparams().scale, whole.qparams().scale)


def test_every_observer_is_within_reach() -> None:
    x = weight(16, 40).abs()
    scales = {
        name: float(calibrated("uniform", UINT8, x, role=Role.ACTIVATION, observer=ObserverSpec(name)).scale)
        for name in ("minmax", "moving_average", "percentile", "mse", "entropy", "aciq")
    }
    assert scales["minmax"] == pytest.approx(float(x.max()) / 255)
    assert scales["moving_average"] == pytest.approx(float(x.amax(1).mean()) / 255)
    with pytest.raises(ConfigError, match=r"observer 'minmux'.*\n.*minmax"):
        create_quantizer("uniform", UINT8, site="a", observer=ObserverSpec("minmux"))


def test_activation_per_channel_has_one_observer_each() -> None:
    x = weight(6, 4, 5) * torch.tensor([1.0, 2.0, 4.0, 0.0])[:, None]
    quantizer = calibrated("uniform", QuantSpec(granularity=PerChannel(1)), x, role=Role.ACTIVATION)
    wanted = x.abs().amax((0, 2)) / 127
    assert torch.allclose(quantizer.scale[:3], wanted[:3])
    assert 0 < quantizer.scale[3] < 1e-6
    with pytest.raises(ConfigError, match="per block"):
        calibrated("uniform", QuantSpec(granularity=PerBlock(1, 2)), x, role=Role.ACTIVATION)


def test_given_range() -> None:
    quantizer = create_quantizer("uniform", UINT8, site="relu.out")
    quantizer.calc_qparams_with_minmax(-1.0, torch.tensor(3.0))
    assert quantizer.qparams() == numerics.qparams_from_range(-1.0, 3.0, UINT8, origin="given range")
    low, high = quantizer.dequantized_range()
    assert float(low) == pytest.approx(-1.0, abs=0.01)
    assert float(high) == pytest.approx(3.0, abs=0.01)
    with pytest.raises(CalibrationError, match=r"relu\.out.*not finite"):
        quantizer.calc_qparams_with_minmax(0.0, float("nan"))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("observer", ["minmax", "percentile", "moving_average"])
def test_what_several_processes_saw_adds_up(name: str, observer: str) -> None:
    x = weight(9, 5).abs() if name == "dorefa" else weight(9, 5)
    how = {"site": "relu.out", "observer": ObserverSpec(observer), "options": {}}
    parts = [create_quantizer(name, UINT8, **how) for _ in range(5)]
    for part, batch in zip(parts, [x[:0], *x.split(3)], strict=False):
        part.observe(batch)  # the first sees an empty batch, the last nothing
    seen = [pickle.loads(pickle.dumps(part.observations())) for part in parts]
    numbers = []
    for part in parts:
        part.merge_observations(seen)
        part.calc_qparams()
        numbers.append(part.qparams())
    assert all(found == numbers[0] for found in numbers)
    whole = create_quantizer(name, UINT8, **how)
    whole.observe(x)
    whole.calc_qparams()
    np.testing.assert_allclose(numbers[0].scale, whole.qparams().scale, rtol=1e-6)
    assert numbers[0].zero_point == whole.qparams().zero_point
