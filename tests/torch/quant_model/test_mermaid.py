"""The diagram of a model and its quantizers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from onnxq.sites import Role
from tests.torch.nets import Branching
from tests.torch.quant_model.kit import W4A4, calibrated
from torch_frontend.quant_model import QuantModel


def test_the_diagram_shows_every_layer_and_every_quantizer() -> None:
    made = calibrated()
    text = made.mermaid()
    assert text.startswith("graph TD\n")
    for site, quantizer in made.quantizers.items():
        assert quantizer.role is Role.WEIGHT or f"{site} uint4" in text
    assert "weight int4 symmetric" in text
    assert "off: conv and relu run as one kernel" in text
    assert "Linear" in QuantModel(Branching(), W4A4).mermaid()
