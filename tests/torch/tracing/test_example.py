"""Control flow on shapes, decided by the example."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from tests.torch.nets import Branching
from torch_frontend.quant_model import QuantModel


class _Shapes(nn.Module):
    """Usual code on shapes, types and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if x.dim() == 2 or len(x.shape) < 3:
            x = x.unsqueeze(0)
        assert x.shape[-1] == 8
        split = x.size()[:-1] + (2, 4)  # noqa: RUF005 - as people write it
        x = self.drop(self.fc(x)).view(*split)
        parts = [part * 2.0 for part in x.unbind(-2)]
        if x.dtype == torch.float16:
            parts = parts[:1]
        y = self.norm(torch.cat(parts, -1).transpose(1, 2)[:, :4].contiguous())
        for other in more:
            y = y + other
        return y


def test_control_flow_on_shapes_goes_the_examples_way_and_says_so() -> None:
    torch.manual_seed(0)
    model, x, other = _Shapes(), torch.randn(3, 5, 8), torch.randn(3, 4, 5)
    before = copy.deepcopy(model.state_dict())
    blind = QuantModel(copy.deepcopy(model).eval(), target="virtual")
    assert [r.rule for r in blind.refusals] == ["tracing"]
    for mode in (True, False):
        quantized = QuantModel(model.train(mode), target="virtual", example_inputs=(x, other))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not quantized.refusals
    assert [d.subject for d in quantized.decisions if d.rule == "shapes"] == ["_Shapes"]
    assert {"input:x", "fc.weight"} <= set(quantized.quantizers)
    torch.testing.assert_close(quantized(x, other), model(x, other))
    torch.testing.assert_close(quantized(x[:2], other[:2]), model(x[:2], other[:2]))


def test_control_flow_on_values_is_not_decided_by_the_example() -> None:
    for example in (None, torch.ones(3, 16)):
        assert not QuantModel(Branching(), target="virtual", example_inputs=example).traced
