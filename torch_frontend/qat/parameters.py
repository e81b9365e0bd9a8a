"""Parameter groups for the optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from onnxq.errors import CalibrationError, ConfigError
from torch_frontend.quantizers import quantizers_of


def parameter_groups(
    module: nn.Module, *, lr: float, qparam_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameters in up to three groups for any torch optimizer, each parameter once.

    Weights of two or more axes with `weight_decay`; biases and norms without; the quantizers' scales, offsets and
    clipping levels without and at `qparam_lr` (None: lr / 10).
    Raises CalibrationError if a quantizer that learns is not calibrated: its parameters do not exist yet and would
    never be trained. Raises ConfigError for rates below 0.
    """
    if lr <= 0 or (qparam_lr is not None and qparam_lr < 0) or weight_decay < 0:
        raise ConfigError("parameter_groups", f"lr={lr}, qparam_lr={qparam_lr}, weight_decay={weight_decay}",
                          "lr must be above 0, the others not below", code="Q318")  # fmt: skip
    learned = {}
    for found in quantizers_of(module):
        if found.learned and found.active and not found.calibrated:
            raise CalibrationError(
                found.site, "has no qparams to learn yet", "calibrate before making the optimizer", code="Q508"
            )
        learned |= {id(p): p for p in found.parameters(recurse=False)}
    # Tied parameters are listed once by module.parameters().
    rest = [p for p in module.parameters() if id(p) not in learned and p.requires_grad]
    groups = (
        ("weights", [p for p in rest if p.ndim > 1], lr, weight_decay),
        ("biases and norms", [p for p in rest if p.ndim <= 1], lr, 0.0),
        # Scales are far below 1, and so must be their steps.
        ("qparams", list(learned.values()), lr / 10 if qparam_lr is None else qparam_lr, 0.0),
    )
    return [{"name": n, "params": p, "lr": rate, "weight_decay": decay} for n, p, rate, decay in groups if p]
