"""Modules and calls of a graph."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx, nn


def find_module(model: nn.Module, node: Any) -> nn.Module | None:
    """The module that a node calls; None for other nodes and for values that are no nodes."""
    return model.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def name_arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """Name -> value of a call's arguments. names: of the first positions."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


# Shared by constants and the example, which run single nodes; whole graphs are run by fx.Interpreter.
def run_call(model: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Result of a node's call of a module, method or function on these arguments, or the attribute it reads."""
    if node.op == "get_attr":
        return attrgetter(str(node.target))(model)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
