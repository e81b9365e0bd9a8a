"""Quantization error by layer, isolated and cumulative."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.errors import ConfigError, DataError, PlanError
from onnxq.evaluation.accumulator import measure_error
from tests.torch.nets import Branching, images
from tests.torch.quant_model.kit import W4A4, calibrated, model


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
