"""Batch norms that a forward writes as a function, F.batch_norm(x, self.running_mean, …, self.training), as modules.

A trace fixes the function to the mode of the trace, in which its statistics would not move; a module is folded, trained
and tuned as nn.BatchNorm2d is. timm's BatchNormAct2d becomes a norm and its activation.

Folded into the layer in front, y = γ (Wx + b − μ) / √(σ² + ε) + β = (fW) x + (b − μ) f + β with f = γ / √(σ² + ε), one
factor an output channel.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from onnxq.sites import Names
from torch_frontend.qmodules import copy_shallowly, explain_unconvertible, register_targets
from torch_frontend.tracing.modules import (
    Kwargs,
    call_module,
    find_module,
    make_unique_path,
    name_arguments,
)
from torch_frontend.tracing.names import list_readers, read_name, scope_of
from torch_frontend.tracing.values import shape_of

_TENSORS = ("running_mean", "running_var", "weight", "bias")
# The names of the arguments in order.
BATCH_NORM = ("input", *_TENSORS, "training", "momentum", "eps")
_FUNCTIONS: dict[Any, Names] = {
    functional.batch_norm: BATCH_NORM,
    torch.batch_norm: (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
        "cudnn_enabled",
    ),
}
# Key of a node's meta: True if the call is in training mode when the model is.
_FOLLOWS = "onnxq_follows_mode"
# Batch norms, and what became of each.
Outcomes = list[tuple[str, str]]


class BatchNorm(_BatchNorm):
    """A batch norm over axis 1 of tensors of any rank."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        """F.batch_norm takes any rank."""


register_targets(BatchNorm, op="batch_norm")


def compare_batch_norms(graph: fx.Graph, other: fx.Graph) -> None:
    """Note which batch norms of a graph follow the mode of the model. other: the same calls in the other mode."""
    for node, twin in zip(graph.nodes, other.nodes, strict=True):
        if node.target in _FUNCTIONS:
            node.meta[_FOLLOWS] = _read_mode(node) != _read_mode(twin)


def replace_batch_norms(model: fx.GraphModule, root: nn.Module) -> Outcomes:
    """Replace batch norms that are functions by modules in the scope of their call, which own the tensors then.

    root: the traced module, whose own batch norms say how they average. Returns (path, reason) of those that stay
    functions though they have statistics.
    """
    functions: Outcomes = []
    modules: dict[tuple[Any, ...], tuple[str, nn.Module]] = {}
    sources: list[fx.Node] = []
    for node in list(model.graph.nodes):
        if node.op != "call_function" or node.target not in _FUNCTIONS:
            continue
        arguments = name_arguments(node, *_FUNCTIONS[node.target])
        tensors = {name: arguments[name] for name in _TENSORS if arguments.get(name) is not None}
        why = _explain_function(root, node, tensors)
        if why is not None:
            if "running_mean" in tensors:
                functions.append((f"{scope_of(node)}.batch_norm".lstrip("."), why))
            continue
        # Calls of one batch norm are calls of one module.
        key = tuple((name, str(source.target)) for name, source in tensors.items())
        if key not in modules:
            path = make_unique_path(model, scope_of(node), "batch_norm")
            modules[key] = path, _make_module(model, root, tensors, arguments)
        call_module(model, node, *modules[key])
        node.args = (arguments["input"],)
        node.kwargs = {}
        sources += tensors.values()
    # Reads that nothing uses any more go, and with them the attributes, which the new modules hold.
    for source in dict.fromkeys(sources):
        if not source.users:
            model.graph.erase_node(source)
    read = {str(node.target) for node in model.graph.find_nodes(op="get_attr")}
    for target in {str(source.target) for source in sources} - read:
        path, _, name = target.rpartition(".")
        delattr(model.get_submodule(path), name)
    return functions


def _read_mode(node: fx.Node) -> Any:
    return name_arguments(node, *_FUNCTIONS[node.target]).get("training", False)


def _find_owner(root: nn.Module, tensors: Mapping[str, fx.Node]) -> _BatchNorm | None:
    """The batch norm of the traced model that holds the tensors, such as a subclass with a forward of its own."""
    first = next(iter(tensors.values()))
    owner = root.get_submodule(str(first.target).rpartition(".")[0])
    return owner if isinstance(owner, _BatchNorm) else None


def _explain_function(root: nn.Module, node: fx.Node, tensors: Kwargs) -> str | None:
    """Reason why a call stays a function, in the mode it was traced in; None if a module computes the same."""
    mode = _read_mode(node)
    if not isinstance(mode, bool) or not tensors:
        return "its mode or its tensors are computed"
    if not all(
        isinstance(source, fx.Node) and source.op == "get_attr" for source in tensors.values()
    ):
        return (
            "its statistics, weight or bias are computed, so that they are not averaged in training"
        )
    statistics = tensors.keys() & {"running_mean", "running_var"}
    if len(statistics) < 2:
        # Without any: those of the batch in both modes.
        return None if mode and not statistics else "its statistics are incomplete"
    owner = _find_owner(root, tensors)
    # The forward of such a class is that of its base; its own mode may differ from the model's, where it is frozen.
    if owner is not None and mode == owner.training:
        return None
    if node.meta.get(_FOLLOWS):
        return None
    return f"its forward has {mode} for `training` in both modes, or what it does in the other is unknown"


def _make_module(
    model: fx.GraphModule,
    root: nn.Module,
    tensors: Mapping[str, fx.Node],
    arguments: Kwargs,
) -> BatchNorm:
    """The module of a call. tensors: names of the batch norm's -> the reads of attributes that give them."""
    values = {name: attrgetter(str(source.target))(model) for name, source in tensors.items()}
    owner = _find_owner(root, tensors)
    # The number in the call is that of one batch, where the owner averages over all of them (momentum None).
    momentum = arguments.get("momentum", 0.1) if owner is None else owner.momentum
    tracks = "running_mean" in values
    size = len(next(iter(values.values())))
    eps = float(arguments.get("eps", 1e-5))
    # Without parameters of its own: those of the model are set below, as the same objects.
    module = BatchNorm(size, eps, momentum, affine=False, track_running_stats=tracks)
    for name, value in values.items():
        if isinstance(value, nn.Parameter):
            setattr(module, name, value)
        else:
            # torch registers no buffer beside a parameter of its name, even if that is None.
            module._parameters.pop(name, None)
            module.register_buffer(name, value)
    if owner is not None and owner.num_batches_tracked is not None:
        # With momentum None averages are over so many batches.
        module.num_batches_tracked = owner.num_batches_tracked
    # Without statistics of its own the function is in training mode in both modes of the model.
    module.training = arguments.get("training", False) if tracks else model.training
    return module


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *_TRANSPOSED)


def fold_batch_norms(model: fx.GraphModule) -> Outcomes:
    """Fold every batch norm whose layer nothing else uses. Returns (batch norm, outcome with the reason if not folded).

    The layer gets new Parameters; those of the float model do not change.
    """
    outcomes: Outcomes = []
    for node, source, why in find_layers(model, lambda value: value):
        outcome = f"folded into {source.target}"
        outcomes.append((read_name(node).name, outcome if why is None else f"not {outcome}: {why}"))
        if why is None:
            fold_call(model, node, source)
    model.delete_all_unused_submodules()  # the folded batch norms
    return outcomes


def find_layers(
    model: fx.GraphModule, see_through: Callable[[Any], Any]
) -> list[tuple[fx.Node, fx.Node, str | None]]:
    """(call of a batch norm, call of the layer in front, reason why folding would change another result or None).

    see_through: the value behind a batch norm's argument, where calls between the two compute nothing.
    """
    folds = []
    for node in model.graph.nodes:
        if isinstance(find_module(model, node), _BatchNorm):
            source = see_through(node.args[0] if node.args else None)
            if isinstance(find_module(model, source), _LAYERS):
                folds.append((node, source, _explain_conflict(model, node, source)))
    return folds


def _explain_conflict(model: fx.GraphModule, node: fx.Node, source: fx.Node) -> str | None:
    """Reason why folding the batch norm that a node calls would change another result, or None. source: its layer."""
    layer = find_module(model, source)
    if len(list_readers(source)) > 1:
        return "others read its result too"
    targets = [call.target for call in model.graph.find_nodes(op="call_module")]
    if targets.count(source.target) > 1 or targets.count(node.target) > 1:
        return "one of the two is called more than once"
    if getattr(find_module(model, node), "running_mean", None) is None:
        return "the batch norm keeps no running statistics"
    if explain_unconvertible(layer) is not None:
        return "the layer's weight is computed"
    # A tied weight must not be scaled for one of its layers.
    holders = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    if any(holders[p] > 1 for p in (layer.weight, layer.bias) if p is not None):
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
    return {f"norm.{key}": getattr(norm, key) for key in _TENSORS}


def _find_factors(tensors: Mapping[str, Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    # In float64, so that folding rounds once.
    doubles = {key: value.detach().double() for key, value in tensors.items() if value is not None}
    mean = doubles["norm.running_mean"]
    ones = torch.ones_like(mean)
    factor = doubles.get("norm.weight", ones) / torch.sqrt(doubles["norm.running_var"] + eps)
    return factor, doubles.get("norm.bias", 0 * ones) - mean * factor


def _spread_factors(layer: nn.Module, weight: Tensor, factor: Tensor) -> Tensor:
    """One factor per output channel, in a shape that broadcasts over the layer's weight."""
    if not isinstance(layer, _TRANSPOSED):
        return factor.reshape(-1, *[1] * (weight.dim() - 1))
    # [in, out / groups, ...]: rows of group g hold the output channels of group g.
    rows = factor.reshape(layer.groups, 1, -1).expand(-1, weight.shape[0] // layer.groups, -1)
    return rows.reshape(weight.shape[0], -1, *[1] * (weight.dim() - 2))


@dataclass(frozen=True)
class Folded:
    """The tensors of a layer, and of the batch norm folded into it, whose names begin with `norm.`."""

    tensors: Mapping[str, Tensor | None]
    eps: float


def fold_tensors(layer: nn.Module, folded: Folded) -> tuple[Tensor, Tensor]:
    """(weight, bias) of a layer of this kind that computes layer and batch norm, in float64 inside."""
    factor, shift = _find_factors(folded.tensors, folded.eps)
    weight = folded.tensors["weight"]
    bias = folded.tensors.get("bias")
    # float64, rounded once at the end.
    scaled = (weight.detach().double() * _spread_factors(layer, weight, factor)).to(weight.dtype)
    shifted = shift if bias is None else shift + bias.detach().double() * factor
    return scaled, shifted.to(weight.dtype)


def fold_layer(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """A shallow copy of the layer that computes layer and batch norm, with Parameters of its own.

    Its attribute `folded` holds the tensors of both.
    """
    copy = copy_shallowly(layer)
    trains = copy.weight.requires_grad
    copy.folded = Folded({"weight": copy.weight, "bias": copy.bias, **_read_norm(norm)}, norm.eps)  # type: ignore
    weight, bias = fold_tensors(layer, copy.folded)
    copy.weight = nn.Parameter(weight, requires_grad=trains)
    copy.bias = nn.Parameter(bias, requires_grad=trains)
    return copy  # type: ignore[no-any-return]


def fold_call(model: fx.GraphModule, norm: fx.Node, layer: fx.Node) -> nn.Module:
    """Fold the batch norm that a node calls into the layer that another calls; returns the layer of both."""
    path = str(layer.target)
    folded = fold_layer(model.get_submodule(path), model.get_submodule(str(norm.target)))
    model.set_submodule(path, folded)
    norm.replace_all_uses_with(norm.args[0])  # type: ignore[arg-type]
    model.graph.erase_node(norm)
    return folded
