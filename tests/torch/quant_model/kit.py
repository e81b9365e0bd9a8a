"""Quantized networks at every step of a QuantModel's life."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.torch.nets import ResNet, calibrate, images, settled
from torch_frontend.quant_model import QuantModel

W4A4: dict[str, Any] = {"target": "virtual", "weights": {"bits": 4}, "activations": {"bits": 4}}


def model(config: dict[str, Any] | None = None, net: Callable[[], nn.Module] = ResNet, **how: Any) -> QuantModel:
    torch.manual_seed(0)
    return QuantModel(settled(net()), config or W4A4, **how)


def calibrated(config: dict[str, Any] | None = None, **how: Any) -> QuantModel:
    return calibrate(model(config), images(seed=0), images(seed=1), **how)


def make_seeded(net: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net()
