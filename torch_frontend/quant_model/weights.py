"""The float weights behind weight quantizers: layers' own, parameters that calls read, and what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_frontend.qmodules import WeightQuantized
from torch_frontend.quantizers import Quantizer


def weights_of(model: nn.Module, paths: Mapping[str, str]) -> dict[str, Tensor]:
    """Site -> the tensor its quantizer reads. paths: sites of weights -> module paths of their quantizers."""
    found: dict[str, Tensor] = {}
    calls = _calls(model)
    for site, path in paths.items():
        owner = model.get_submodule(path.rpartition(".")[0])
        if isinstance(owner, WeightQuantized):
            found[site] = owner.weight
        elif path in calls:
            assert isinstance(model, fx.GraphModule)
            found[site] = value_of(model, calls[path].args[0])
    return found


def _calls(model: nn.Module) -> dict[str, fx.Node]:
    if not isinstance(model, fx.GraphModule):
        return {}
    return {str(node.target): node for node in model.graph.nodes if node.op == "call_module"}


def value_of(model: fx.GraphModule, node: Any) -> Any:
    """A value that only parameters go into."""
    if not isinstance(node, fx.Node):
        return node
    if node.op == "get_attr":
        owner, _, leaf = str(node.target).rpartition(".")
        return getattr(model.get_submodule(owner), leaf)
    args = fx.map_arg(node.args, lambda n: value_of(model, n))
    kwargs = fx.map_arg(node.kwargs, lambda n: value_of(model, n))
    with torch.no_grad():
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            return args[0] if isinstance(module, Quantizer) else module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
