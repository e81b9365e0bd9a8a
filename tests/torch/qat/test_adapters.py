"""Low-rank adapters beside frozen quantized weights: trained, exported, and merged into the weights."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from onnxq.runtime import Session
from tests.torch.nets import observe, take_step
from torch_frontend import qat
from torch_frontend.export import to_onnx
from torch_frontend.quant_model import PartialStateWarning, QuantModel

CONFIG: dict[str, Any] = {
    "extends": "ort-int4-weights",
    "rules": [{"node": ["*.down", "*.up"], "set": {"float": True}}],
}


class Adapted(nn.Module):
    """A Linear and two thin ones beside it, of which the second starts at 0."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merge(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def calibrate(net: nn.Module, config: dict[str, Any], x: Tensor) -> QuantModel:
    return observe(QuantModel(net, config, example_inputs=x), x).init_qat()


def check_file(model: QuantModel, x: Tensor) -> int:
    """The number of weights with pairs; the file computes as the model does."""
    done = to_onnx(model.freeze(), x)
    found = Session(done.model, optimize=False).run({done.model.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(next(iter(found.values())), model(x).detach().numpy(), atol=1e-4)
    return [node.op_type for node in done.model.graph.node].count("DequantizeLinear")


def test_adapters_are_trained_exported_and_merged() -> None:
    x, wanted = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)), make_net()
    net = nn.Sequential(*(Adapted(part) if isinstance(part, nn.Linear) else part for part in make_net()))
    with torch.no_grad():
        wanted[0].weight.add_(0.1)
        answers = wanted(x)
    model = calibrate(net, CONFIG, x)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".up." in name or ".down." in name)
    before = model.state_dict()["model.0.base.weight"].clone()
    optimizer = torch.optim.Adam(qat.parameter_groups(model, lr=0.02))
    losses = [take_step(optimizer, (model(x) - answers).square().mean()) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.equal(model.state_dict()["model.0.base.weight"], before)
    assert check_file(model, x) == 2

    trained = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    net.load_state_dict({name: trained[name] for name in net.state_dict()})
    merged = nn.Sequential(*(part.merge() if isinstance(part, Adapted) else part for part in net))
    final = calibrate(make_net(), {"extends": "ort-int4-weights"}, x)
    with pytest.warns(PartialStateWarning, match="scales are from before"):
        final.load_state_dict(merged.state_dict())
    observe(final, x).init_qat()
    assert float((final(x) - answers).square().mean().detach()) < 0.5 * losses[0]
    assert check_file(final, x) == 2
