"""Freeze batch norms while the rest of a model trains on."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def freeze_batch_norms(module: nn.Module) -> int:
    """Put every batch norm in evaluation mode and stop its weight and bias; return their number.

    `module.train()` undoes the mode, so call this after it each time, as a Pacer does. Krishnamoorthi 2018
    (arXiv 1806.08342, §3.2) freezes them towards the end, when the moving averages have settled.
    """
    found = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    for norm in found:
        norm.eval()  # running means and variances no longer move
        for parameter in norm.parameters(recurse=False):
            parameter.requires_grad_(False)
    return len(found)
