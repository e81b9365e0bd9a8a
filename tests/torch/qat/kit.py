"""A small network with learned quantizers, its batches, and its training."""

import torch
import torch.nn.functional as F
from torch import nn

from onnxq.sites import Role
from onnxq.spec import ObserverSpec, PerChannel, QuantSpec
from tests.torch.nets import observe, take_step
from torch_frontend import qat
from torch_frontend.quantizers import create_quantizer

U4 = QuantSpec(bits=4, signed=False, symmetric=False)
W4 = QuantSpec(bits=4, granularity=PerChannel(0))


class Layer(nn.Module):
    """A convolution with batch norm, its input and weight quantized."""

    def __init__(self, name: str, wide: int, out: int, kind: str, observer: str = "minmax") -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.seen = create_quantizer(kind, U4, site=f"{name}.in", observer=ObserverSpec(observer))
        self.weight = create_quantizer(kind if kind != "pact" else "lsq", W4, site=f"{name}.weight", role=Role.WEIGHT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.conv2d(self.seen(x), self.weight(self.conv.weight), padding=1)).relu()


class Net(nn.Module):
    def __init__(self, kind: str = "lsq", observer: str = "minmax") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = Layer("a", 1, 4, kind, observer)
        self.b = Layer("b", 4, 4, kind, observer)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)).mean((2, 3)))


def batch(seed: int, count: int = 8) -> torch.Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def observed(kind: str = "lsq") -> Net:
    return observe(Net(kind), batch(0))


def train(net: Net, steps: int, schedule: qat.Schedule, seed: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.05), momentum=0.9)
    pacer = qat.Pacer(net, schedule)
    pacer.attach(optimizer)
    losses = []
    for step in range(steps):
        net.train()
        pacer.step()
        x = batch(seed + step % 4)
        loss = F.cross_entropy(net(x), (x.mean((1, 2, 3)) * 6 - 2).long().clamp(0, 2)) + qat.penalty(net)
        losses.append(take_step(optimizer, loss))
    return losses
