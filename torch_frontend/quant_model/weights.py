"""The float weights behind weight quantizers: layers' own, parameters that calls read, and what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn

from torch_frontend.qmodules import WeightQuantized
from torch_frontend.tracing import value_of


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
