"""Arguments that keep their default, and examples that do not fit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.errors import DataError
from torch_frontend.quant_model import QuantModel


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        x = self.fc(x) * scale
        return x if mask is None else x * mask


def test_an_argument_nobody_passes_keeps_its_default_and_says_so() -> None:
    model, x, mask = _Masked(), torch.randn(2, 4), torch.tensor([1.0, 0.0, 1.0, 0.0])
    quantized = QuantModel(model, target="virtual", example_inputs=x)
    assert torch.equal(quantized(x), model(x))
    assert torch.equal(quantized(x, None, scale=2.0), model(x))
    assert [d.subject for d in quantized.decisions if d.rule == "arguments"] == ["mask", "scale"]
    for given in ({"mask": mask}, {"scale": 3.0}):
        with pytest.raises(DataError, match="fixed at its default"):
            quantized(x, **given)
    masked = QuantModel(model, target="virtual", example_inputs={"x": x, "mask": mask})
    assert torch.equal(masked(x, mask), model(x, mask))


def test_an_example_that_does_not_fit_says_so() -> None:
    with pytest.raises(DataError, match="do not fit"):
        QuantModel(_Masked(), target="virtual", example_inputs=(1, 2, 3, 4))
    with pytest.raises(DataError, match="does not run"):
        QuantModel(_Masked(), target="virtual", example_inputs=torch.randn(2, 5))
