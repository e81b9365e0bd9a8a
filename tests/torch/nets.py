"""Small networks of the kinds people train: residual, mobile, with concats, transformer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_frontend import qat
from torch_frontend.quant_model import QuantModel


class Network(nn.Module):
    """Parts by name, and what they compute of an input: compute(network, x)."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


class Block(nn.Module):
    """A residual block with one ReLU module called twice and an in-place sum."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.down is not None:
            x = self.down(x)
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """Stem, two blocks, functional pooling, classifier. Input [N, 3, 16, 16]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width), Block(width, 2 * width, 2))
        self.fc = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn(self.stem(x))), 2)
        x = functional.adaptive_avg_pool2d(self.layer1(x), 1)
        return self.fc(torch.flatten(x, 1))


class Inverted(nn.Module):
    """An inverted residual: expand, depthwise, project."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 2 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class Mobile(nn.Module):
    """Depthwise convolutions. Input [N, 3, 16, 16]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        blocks = Inverted(width, width, 1), Inverted(width, 2 * width, 2), Inverted(2 * width, 2 * width, 1)
        self.features = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU6(), *blocks)
        self.pool, self.drop, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(torch.flatten(self.pool(self.features(x)), 1)))


class Dense(nn.Module):
    """Two branches joined by a concat. Input [N, 3, 16, 16]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        inputs = (3, width, 2 * width)
        self.a, self.b, self.c = (nn.Conv2d(size, width, 3, 1, 1) for size in inputs)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.a(x))
        y = functional.relu(self.b(x))
        z = functional.relu(self.c(torch.cat([x, y], 1)))
        return self.fc(z.mean((2, 3)))


class Encoder(nn.Module):
    """Token embedding tied to the output, two of torch's encoder layers. Input [N, 6] integers, optional padding."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, **{"dropout": 0.0, "batch_first": True, **how})  # type: ignore
        self.embed = nn.Embedding(20, 16)
        self.position = nn.Parameter(0.1 * torch.randn(6, 16))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():  # copies of one layer otherwise
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(16, 20)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(ids) + self.position, src_key_padding_mask=padding))


class Branching(nn.Module):
    """Control flow on values: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 1e6:
            y = -y
        return self.third(self.second(y).relu() + y)


class Around(nn.Module):
    """A traceable model around a part that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(16, 16), Branching(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inside(self.before(x).relu()).relu())


def images(count: int = 4, seed: int = 0) -> Tensor:
    """Random input of the convolutional nets."""
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def calibrate(model: QuantModel, *batches: Tensor | tuple[Tensor, ...], **how: Any) -> QuantModel:
    """The model with the numbers of these batches, tuples of several inputs. how: of calc_qparams."""
    model.prepare_calibration()
    for batch in batches:
        model(*(batch if isinstance(batch, tuple) else (batch,)))
    return model.calc_qparams(**how)


def observe(model: QuantModel, x: Tensor) -> QuantModel:
    """The model with the first numbers of its training."""
    with qat.observing(model):
        model(x)
    return model


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One step down the gradients of the loss, which is returned."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def settled(model: nn.Module) -> nn.Module:
    """Eval mode, with batch norms that have seen something."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.2 * torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
            with torch.no_grad():
                module.weight.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    return model.eval()
