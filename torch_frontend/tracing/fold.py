"""Batch norms folded into the layer in front: y = γ (Wx + b − μ) / √(σ² + ε) + β = (fW) x + (b − μ) f + β.

f = γ / √(σ² + ε), one factor an output channel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_frontend.qmodules import copy_shallowly, explain_unconvertible
from torch_frontend.tracing.modules import find_module
from torch_frontend.tracing.names import list_readers, read_name
from torch_frontend.tracing.values import shape_of

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *_TRANSPOSED)


def fold_batch_norms(model: fx.GraphModule) -> list[tuple[str, str]]:
    """Fold every batch norm whose layer nothing else uses. Returns (batch norm, outcome with the reason if not folded).

    The layer gets new Parameters; those of the float model do not change.
    """
    done: list[tuple[str, str]] = []
    for node, source, why in find_layers(model, lambda value: value):
        name = read_name(node)
        path = name.name if name is not None else str(node.target)
        if why is not None:
            done.append((path, f"not folded into {source.target}: {why}"))
            continue
        layer, norm = (model.get_submodule(str(one.target)) for one in (source, node))
        model.set_submodule(str(source.target), fold_layer(layer, norm))
        node.replace_all_uses_with(source)
        model.graph.erase_node(node)
        done.append((path, f"folded into {source.target}"))
    model.delete_all_unused_submodules()  # the folded batch norms
    return done


def find_layers(model: fx.GraphModule, see_through: Callable[[Any], Any]) -> list[tuple[fx.Node, fx.Node, str | None]]:
    """(call of a batch norm, call of the layer in front, reason why folding would change another result or None).

    see_through: the value behind a batch norm's argument, where calls between the two compute nothing.
    """
    calls = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
    # How many modules hold each Parameter: a tied weight must not be scaled for one of them.
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = []
    for node in model.graph.nodes:
        norm = find_module(model, node)
        if not isinstance(norm, _BatchNorm):
            continue
        source = see_through(node.args[0] if node.args else None)
        layer = find_module(model, source)
        if isinstance(layer, _LAYERS):
            found.append((node, source, _explain_conflict(node, source, norm, layer, calls, holders)))
    return found


def _explain_conflict(
    node: fx.Node, source: fx.Node, norm: nn.Module, layer: nn.Module, calls: Counter[str], holders: Counter[int]
) -> str | None:
    """Reason why folding would change another result, or None."""
    if len(list_readers(source)) > 1:
        return "others read its result too"
    if calls[str(source.target)] > 1 or calls[str(node.target)] > 1:
        return "one of the two is called more than once"
    if getattr(norm, "running_mean", None) is None:
        return "the batch norm keeps no running statistics"
    if explain_unconvertible(layer) is not None:
        return "the layer's weight is computed"
    if any(holders[id(p)] > 1 for p in (layer.weight, layer.bias) if p is not None):
        return "the layer's weight is another layer's too"
    # BatchNorm1d normalizes axis 1, which is a Linear's feature axis only for [N, features].
    if isinstance(layer, nn.Linear):
        shape = shape_of(source)
        if shape is None:
            return "whether it normalizes the layer's features is unknown without example_inputs"
        if len(shape) != 2:
            return "it does not normalize the layer's features"
    return None


def compute_factors(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(f, shift) of the batch norm as y = f x + shift, one value per channel, float64."""
    return _find_factors(_read_norm(norm), norm.eps)  # type: ignore[arg-type]


def _read_norm(norm: nn.Module) -> dict[str, Tensor | None]:
    return {key: getattr(norm, key) for key in ("weight", "bias", "running_mean", "running_var")}


def _find_factors(norm: Mapping[str, Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    held = {key: value.detach().double() for key, value in norm.items() if value is not None}
    mean, ones = held["running_mean"], torch.ones_like(held["running_mean"])
    factor = held.get("weight", ones) / torch.sqrt(held["running_var"] + eps)
    return factor, held.get("bias", 0 * ones) - mean * factor


def _spread_factors(layer: nn.Module, weight: Tensor, factor: Tensor) -> Tensor:
    """One factor per output channel, in a shape that broadcasts over the layer's weight."""
    if not isinstance(layer, _TRANSPOSED):
        return factor.reshape(-1, *[1] * (weight.dim() - 1))
    # [in, out / groups, ...]: rows of group g hold the output channels of group g.
    rows = factor.reshape(layer.groups, 1, -1).expand(-1, weight.shape[0] // layer.groups, -1)
    return rows.reshape(weight.shape[0], -1, *[1] * (weight.dim() - 2))


@dataclass(frozen=True)
class Folded:
    """The tensors of a layer and of the batch norm folded into it, by their names there."""

    layer: Mapping[str, Tensor | None]
    norm: Mapping[str, Tensor | None]
    eps: float


def fold_tensors(layer: nn.Module, folded: Folded) -> tuple[Tensor, Tensor]:
    """(weight, bias) of a layer of this kind that computes layer and batch norm, in float64 inside."""
    factor, shift = _find_factors(folded.norm, folded.eps)
    weight, bias = folded.layer["weight"], folded.layer.get("bias")
    assert weight is not None
    # float64, rounded once at the end.
    made = (weight.detach().double() * _spread_factors(layer, weight, factor)).to(weight.dtype)
    shifted = shift if bias is None else shift + bias.detach().double() * factor
    return made, shifted.to(weight.dtype)


def fold_layer(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """A shallow copy of the layer that computes layer and batch norm, with Parameters of its own.

    Its attribute `folded` holds the tensors of both.
    """
    made = copy_shallowly(layer)
    old: Any = layer
    made.folded = Folded({"weight": old.weight, "bias": old.bias}, _read_norm(norm), norm.eps)  # type: ignore
    weight, bias = fold_tensors(layer, made.folded)  # type: ignore[arg-type]
    made.weight = nn.Parameter(weight, requires_grad=old.weight.requires_grad)
    made.bias = nn.Parameter(bias, requires_grad=old.weight.requires_grad)
    return made
