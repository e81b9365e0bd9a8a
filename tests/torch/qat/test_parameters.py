"""Optimizer groups."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError, ConfigError
from tests.torch.qat.kit import Net, observed
from torch_frontend import qat
from torch_frontend.quantizers import quantizers_of


def test_every_parameter_is_in_one_group() -> None:
    net = observed()
    groups = {group["name"]: group for group in qat.parameter_groups(net, lr=0.1, weight_decay=0.01)}
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in net.parameters())
    assert {id(p) for p in groups["qparams"]["params"]} == {id(found.scale) for found in quantizers_of(net)}
    assert (groups["qparams"]["lr"], groups["qparams"]["weight_decay"]) == (0.01, 0.0)
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (0.1, 0.01)
    assert all(p.ndim <= 1 for p in groups["biases and norms"]["params"])
    assert groups["biases and norms"]["weight_decay"] == 0.0
    torch.optim.SGD(list(groups.values()))


def test_an_optimizer_without_the_scales_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"a\.in.*no qparams to learn"):
        qat.parameter_groups(Net(), lr=0.1)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"lr": 0.1, "qparam_lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}])
def test_rates_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        qat.parameter_groups(observed(), **wrong)
