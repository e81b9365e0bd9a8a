"""The whole way on scikit-learn's digits: float, few bits, training, export, and the answers in ONNX Runtime."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor, nn

import onnxq
from onnxq.runtime import Session
from torch_frontend import qat
from torch_frontend.export import export_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.quantizers import quantizers_of

Digits = tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.a, self.b = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        x = torch.relu(x + self.b(torch.relu(self.a(x))))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def digits() -> Digits:
    """A trained net, 1200 images with labels, and those it did not see."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]
    torch.manual_seed(0)
    net = Net()
    fit(net, torch.optim.Adam(net.parameters(), lr=5e-3), x[:1200], y[:1200], epochs=25)
    return net.eval(), x[:1200], y[:1200], x[1200:], y[1200:]


def fit(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, *, epochs: int, pacer=None) -> None:
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        net.train()
        for rows in torch.randperm(len(x), generator=generator).split(64):
            if pacer is not None:
                pacer.step()
            loss = F.cross_entropy(net(x[rows]), y[rows]) + qat.penalty(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rate.step()


def score(answers: Tensor, y: Tensor) -> float:
    return 100 * float((answers.argmax(1) == y).double().mean())


def quantized(net: nn.Module, x: Tensor, kind: str, bits: int) -> QuantModel:
    config = {
        "target": "virtual",
        "weights": {"bits": bits, "observer": "mse"},
        "activations": {"bits": 4, "observer": "mse"},
        "rules": [{"node": ["stem.0", "head"], "set": {"bits": 8}}],
        "torch": {"weights": {"quantizer": "lsq" if kind == "pact" else kind}, "activations": {"quantizer": kind}},
    }
    model = QuantModel(net, config, example_inputs=x[:2]).eval()
    with qat.observing(model):
        model(x[:256])
    return model.set_quant()


@pytest.mark.parametrize(("kind", "bits"), [("lsq", 2), ("lsq+", 4), ("pact", 4)])
def test_training_brings_back_what_rounding_lost(digits: Digits, kind: str, bits: int, tmp_path: Path) -> None:
    net, x, y, unseen, labels = digits
    with torch.no_grad():
        full = score(net(unseen), labels)
        rounded = score(quantized(net, x, "uniform", bits)(unseen), labels)
    model = quantized(net, x, kind, bits).init_qat()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.02), momentum=0.9)
    pacer = qat.Pacer(model, qat.Schedule(freeze_batch_norms=60))
    pacer.attach(optimizer)
    fit(model, optimizer, x, y, epochs=8, pacer=pacer)
    model.freeze()
    with torch.no_grad():
        answers = model(unseen)
    assert full > 95
    assert score(answers, labels) > max(rounded, full - 1.5)

    exported = export_onnx(model, tmp_path / "net.onnx", x[:2], dynamic_batch=True)
    assert len(exported.plan.sites) == len([q for q in quantizers_of(model) if q.active])
    (said,) = Session(tmp_path / "net.onnx", optimize=False).run({"x": unseen.numpy()}).values()
    assert np.abs(said - answers.numpy()).max() < 1e-4
    again = onnxq.apply(tmp_path / "net.float.onnx", exported.plan, overrides={"latency": False}).model
    (repeated,) = Session(again, optimize=False).run({"x": unseen.numpy()}).values()
    assert (repeated == said).all()


def test_a_teacher_alone_is_enough(digits: Digits) -> None:
    """Distillation without a label."""
    net, x, _, unseen, labels = digits
    model = quantized(net, x, "lsq", 2).init_qat()
    distiller = qat.Distiller(net, alpha=1.0)
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.01), momentum=0.9)
    before = copy.deepcopy(model).eval()
    for rows in torch.arange(1200).repeat(5).split(64):
        optimizer.zero_grad()
        distiller.loss(model(x[rows]), distiller.answers(x[rows]), torch.zeros(())).backward()
        optimizer.step()
    with torch.no_grad():
        assert score(model.eval()(unseen), labels) > score(before(unseen), labels)
