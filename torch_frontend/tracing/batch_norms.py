"""Batch norms that a forward writes as a function, F.batch_norm(x, self.running_mean, …, self.training), as modules.

A trace fixes the function to the mode of the trace, in which its statistics would not move; a module is folded, trained
and tuned as nn.BatchNorm2d is. timm's BatchNormAct2d becomes a norm and its activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from torch_frontend.qmodules.registry import register_targets
from torch_frontend.tracing.modules import name_arguments
from torch_frontend.tracing.names import make_unique_path, scope_of

# The names of the arguments in order.
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: (
        "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
    ),
    torch.batch_norm: (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
    ),
}  # fmt: skip
_TENSORS = ("running_mean", "running_var", "weight", "bias")
# Key of a node's meta: True if the call is in training mode when the model is.
_FOLLOWS = "onnxq_follows_mode"


class BatchNorm(_BatchNorm):
    """A batch norm over axis 1 of tensors of any rank."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        """F.batch_norm takes any rank."""


register_targets(BatchNorm, op="batch_norm")


@contextmanager
def keep_batch_counts(model: nn.Module) -> Iterator[None]:
    """Run a block, a trace, which executes `self.num_batches_tracked.add_(1)` of a forward; then restore the counts."""
    counts = [one for name, one in model.named_buffers() if name.endswith("num_batches_tracked")]
    before = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, held in zip(counts, before, strict=True):
            count.copy_(held)


def compare_batch_norms(graph: fx.Graph, other: fx.Graph) -> None:
    """Note which batch norms of a graph follow the mode of the model. other: the same calls in the other mode."""
    for node, twin in zip(graph.nodes, other.nodes, strict=True):
        if node.target in _FUNCTIONS:
            node.meta[_FOLLOWS] = _read_mode(node) != _read_mode(twin)


def replace_batch_norms(model: fx.GraphModule, root: nn.Module) -> list[tuple[str, str]]:
    """Replace batch norms that are functions by modules in the scope of their call, which own the tensors then.

    root: the traced module, whose own batch norms say how they average. Returns (path, reason) of those that stay
    functions though they have statistics.
    """
    left: list[tuple[str, str]] = []
    made: dict[tuple[str | None, ...], str] = {}
    taken: list[fx.Node] = []
    for node in list(model.graph.nodes):
        if node.op != "call_function" or node.target not in _FUNCTIONS:
            continue
        args = name_arguments(node, *_FUNCTIONS[node.target])
        tensors = {name: args.get(name) for name in _TENSORS}
        path = f"{scope_of(node)}.batch_norm".lstrip(".")
        why = _explain_function(model, root, node, tensors)
        if why is not None:
            if tensors["running_mean"] is not None:
                left.append((path, why))
            continue
        sources = [one for one in tensors.values() if isinstance(one, fx.Node)]
        # Calls of one batch norm are calls of one module.
        key = tuple(None if one is None else str(one.target) for one in tensors.values())
        if key not in made:
            made[key] = make_unique_path(model, scope_of(node), "batch_norm")
            owner = _find_owner(root, tensors)
            model.add_submodule(made[key], _make_module(model, tensors, args, owner, _read_mode(node)))
        node.op, node.target, node.args, node.kwargs = "call_module", made[key], (args["input"],), {}
        node.meta["nn_module_stack"] = {**(node.meta.get("nn_module_stack") or {}), made[key]: (made[key], BatchNorm)}
        taken += sources
    _remove_attributes(model, taken)
    return left


def _read_mode(node: fx.Node) -> Any:
    return name_arguments(node, *_FUNCTIONS[node.target]).get("training", False)


def _find_owner(root: nn.Module, tensors: dict[str, Any]) -> _BatchNorm | None:
    """The batch norm of the traced model that holds the tensors, such as a subclass with a forward of its own."""
    held = next((str(one.target) for one in tensors.values() if isinstance(one, fx.Node)), None)
    found = None if held is None else root.get_submodule(held.rpartition(".")[0])
    return found if isinstance(found, _BatchNorm) else None


def _explain_function(model: fx.GraphModule, root: nn.Module, node: fx.Node, tensors: dict[str, Any]) -> str | None:
    """Reason why a call stays a function, in the mode it was traced in; None if a module computes the same."""
    mode = _read_mode(node)
    sources = [one for one in tensors.values() if one is not None]
    if not isinstance(mode, bool) or not sources:
        return "its mode or its tensors are computed"
    if not all(isinstance(one, fx.Node) and one.op == "get_attr" for one in sources):
        return "its statistics, weight or bias are computed, so that they are not averaged in training"
    if tensors["running_mean"] is None or tensors["running_var"] is None:
        # Statistics of the batch in both modes.
        return None if mode and tensors["running_mean"] is tensors["running_var"] else "its statistics are incomplete"
    owner = _find_owner(root, tensors)
    # The forward of such a class is that of its base; its own mode may differ from the model's, where it is frozen.
    if owner is not None and mode == owner.training:
        return None
    if node.meta.get(_FOLLOWS):
        return None
    return f"its forward has {mode} for `training` in both modes, or what it does in the other is unknown"


def _make_module(
    model: fx.GraphModule, tensors: dict[str, Any], args: dict[str, Any], owner: _BatchNorm | None, training: bool
) -> BatchNorm:
    values = {name: None if one is None else _read_attribute(model, one) for name, one in tensors.items()}
    size = next(len(value) for value in values.values() if value is not None)
    # The number in the call is that of one batch, where the owner averages over all of them (momentum None).
    momentum = args.get("momentum", 0.1) if owner is None else owner.momentum
    tracks = values["running_mean"] is not None
    made = BatchNorm(size, float(args.get("eps", 1e-5)), momentum, affine=False, track_running_stats=tracks)
    for name, value in values.items():
        if isinstance(value, nn.Parameter):
            setattr(made, name, value)
        elif value is not None:
            made._parameters.pop(name, None)
            made.register_buffer(name, value)
    if owner is not None and owner.num_batches_tracked is not None:
        made.num_batches_tracked = owner.num_batches_tracked
    # Without statistics of its own the function is in training mode in both modes of the model.
    made.training = training if tracks else model.training
    return made


def _read_attribute(model: fx.GraphModule, node: fx.Node) -> Tensor:
    path, _, name = str(node.target).rpartition(".")
    value: Tensor = getattr(model.get_submodule(path), name)
    return value


def _remove_attributes(model: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Erase reads that nothing uses any more, and the attributes, which the new modules hold."""
    for node in dict.fromkeys(nodes):
        if not node.users:
            model.graph.erase_node(node)
    read = {str(node.target) for node in model.graph.nodes if node.op == "get_attr"}
    for target in {str(node.target) for node in nodes} - read:
        path, _, name = target.rpartition(".")
        delattr(model.get_submodule(path), name)
