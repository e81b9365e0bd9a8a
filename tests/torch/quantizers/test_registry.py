"""Quantizers by name, and users' own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import ConfigError
from onnxq.spec import PerChannel, QuantSpec
from tests.torch.quantizers.kit import NAMES, calibrated, weight
from torch_frontend.quantizers import (
    Quantizer,
    create_quantizer,
    register_quantizer,
)
from torch_frontend.quantizers.registry import _REGISTRY


def test_names() -> None:
    assert set(NAMES) <= set(_REGISTRY)
    with pytest.raises(ConfigError, match=r"did you mean 'lsq'"):
        create_quantizer("lsqq", QuantSpec(), site="a")


def test_your_own_quantizer() -> None:
    try:

        @register_quantizer("power-of-two")
        class PowerOfTwo(Quantizer):
            """Scales rounded to powers of two."""

            def make_slots(self, scale: torch.Tensor, zero_point: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"scale": scale.log2().ceil().exp2(), "zero_point": zero_point}

        assert "power-of-two" in _REGISTRY
        quantizer = calibrated("power-of-two", QuantSpec(bits=4, granularity=PerChannel(0)), weight())
        assert torch.equal(quantizer.scale.log2(), quantizer.scale.log2().round())
        with pytest.raises(ConfigError, match="registered already"):
            register_quantizer("power-of-two")(PowerOfTwo)
        with pytest.raises(TypeError, match="not a subclass"):
            register_quantizer("other")(torch.nn.Linear)
    finally:
        _REGISTRY.pop("power-of-two", None)
