"""Tensors that do not fit their scales."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import CalibrationError, PlanError
from onnxq.sites import Role
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.quantizers.kit import UINT8, calibrated, weight


def test_a_tensor_that_does_not_fit_names_the_site() -> None:
    quantizer = calibrated("uniform", QuantSpec(granularity=PerChannel(0)), weight())
    with pytest.raises(PlanError, match=r"conv\.weight: scales of shape \(8,\).*needs \(4,\)"):
        quantizer(weight(4, 6))
    with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
        calibrated("uniform", QuantSpec(), torch.tensor([1.0, float("nan")]))
    with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
        calibrated("uniform", UINT8, torch.tensor([1.0, float("nan")]), Role.ACTIVATION)
    with pytest.raises(CalibrationError, match=r"conv\.weight: .*NaN"):
        calibrated("lsq", UINT8, torch.tensor([1.0, float("nan")]), Role.ACTIVATION)
