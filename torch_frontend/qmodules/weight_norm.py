"""Weight norms multiplied out: w = g v / |v| becomes the plain weight of its layer, as a batch norm is folded.

Salimans and Kingma 2016 (arXiv 1602.07868) split a weight so that gradient descent converges faster; the function of
the network does not depend on it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.weight_norm import WeightNorm

from torch_frontend.qmodules.layers import copy_module_tree, copy_shallowly


def multiply_weight_norms(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """(model, paths of its layers whose weight norm is multiplied out); a copy with the same tensors if any is."""
    found = [path for path, module in model.named_modules() if path and _has_weight_norm(module)]
    if not found:
        return model, []
    made = copy_module_tree(model)
    plain: dict[int, nn.Module] = {}
    for path in found:
        layer = made.get_submodule(path)
        plain[id(layer)] = _make_plain(layer)
    # One module under two names stays one module.
    for path, module in list(made.named_modules(remove_duplicate=False)):
        if id(module) in plain:
            made.set_submodule(path, plain[id(module)])
    return made, found


def _has_weight_norm(module: nn.Module) -> bool:
    if any(isinstance(hook, WeightNorm) and hook.name == "weight" for hook in module._forward_pre_hooks.values()):
        return True
    if not parametrize.is_parametrized(module) or list(module.parametrizations) != ["weight"]:  # type: ignore[arg-type]
        return False
    chain: Any = module.parametrizations["weight"]  # type: ignore[index]
    return len(chain) == 1 and isinstance(chain[0], parametrizations._WeightNorm)


def _make_plain(layer: nn.Module) -> nn.Module:
    """The layer with the weight that its weight norm gives now."""
    made: Any = copy_shallowly(layer)
    if parametrize.is_parametrized(layer):
        weight = layer.weight
        # torch makes a class for each parametrized layer, below the layer's own.
        made.__class__ = type(layer).__base__
        del made._modules["parametrizations"]
    else:
        (key, hook), *_ = [(k, one) for k, one in made._forward_pre_hooks.items() if isinstance(one, WeightNorm)]
        weight = hook.compute_weight(layer)
        del made._forward_pre_hooks[key], made._parameters["weight_g"], made._parameters["weight_v"]
        made.__dict__.pop("weight", None)
    made.weight = nn.Parameter(weight.detach().clone())
    return made
