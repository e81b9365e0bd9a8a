"""The float weights that weight quantizers read: layers' own, parameters, and values computed from parameters alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn

from torch_frontend.qmodules import WeightQuantized
from torch_frontend.tracing import compute_constant, split_path


def map_weights(model: nn.Module, paths: Mapping[str, str]) -> dict[str, Tensor]:
    """Site -> the tensor its quantizer reads. paths: sites of weights -> module paths of their quantizers."""
    found: dict[str, Tensor] = {}
    calls = _map_calls(model)
    for site, path in paths.items():
        owner = model.get_submodule(split_path(path)[0])
        # A layer's quantizer is its child; that of a parameter is a call of its own.
        if isinstance(owner, WeightQuantized):
            found[site] = owner.weight
        elif path in calls:
            assert isinstance(model, fx.GraphModule)
            found[site] = compute_constant(model, calls[path].args[0])
    return found


def _map_calls(model: nn.Module) -> dict[str, fx.Node]:
    if not isinstance(model, fx.GraphModule):
        return {}
    return {str(node.target): node for node in model.graph.nodes if node.op == "call_module"}
