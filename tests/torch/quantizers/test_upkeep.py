"""Learned values after optimizer steps: legal scales, and NaN by site."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError
from onnxq.sites import Role
from onnxq.spec import QuantSpec
from tests.torch.quantizers.papers import quantizer
from torch_frontend.quantizers import PostStep, create_quantizer, penalty


@pytest.mark.parametrize("name", ["lsq", "lsq+", "pact"])
def test_scales_stay_positive_whatever_the_optimizer_does(name: str) -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    made = quantizer(name, spec, 0.1, role=Role.ACTIVATION).float()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e6)
    handle = PostStep(made).attach(optimizer)
    made(torch.full((2, 3), 50.0)).sum().backward()
    optimizer.step()
    assert np.all(made.qparams().scale > 0)
    y = made(torch.ones(2, 3))
    assert bool(y.isfinite().all())
    handle.remove()


@pytest.mark.parametrize("name", ["lsq", "lsq+", "pact"])
def test_nan_in_training_names_the_site(name: str) -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    net = torch.nn.ModuleDict({k: quantizer(name, spec, 0.1, role=Role.ACTIVATION) for k in ("a", "b")})
    net["b"].site = "layer1.relu.out"
    upkeep = PostStep(net)
    upkeep()
    next(net["b"].parameters()).data.fill_(float("nan"))
    with pytest.raises(CalibrationError, match=r"(?s)layer1\.relu\.out: .*no longer a finite number.*learning rate"):
        upkeep()
    with pytest.raises(CalibrationError, match=r"layer1\.relu\.out"):
        net["b"].qparams()


def test_nothing_to_keep_up_is_fine() -> None:
    net = torch.nn.ModuleDict({"a": create_quantizer("lsq", QuantSpec(), site="s")})
    PostStep(net)()
    assert penalty(net) == 0.0
