"""Modules, attributes and calls of a graph, found by their dotted paths."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


def split_path(path: str) -> tuple[str, str]:
    """(owner, leaf) of a dotted path; the owner of a top-level name is ""."""
    owner, _, leaf = path.rpartition(".")
    return owner, leaf


def read_attribute(model: nn.Module, path: str) -> Any:
    """The parameter, buffer or constant at a dotted path."""
    owner, leaf = split_path(path)
    return getattr(model.get_submodule(owner), leaf)


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Set the submodule at a dotted path."""
    owner, leaf = split_path(path)
    setattr(model.get_submodule(owner), leaf, module)


def find_module(model: nn.Module, node: Any) -> nn.Module | None:
    """The module that a node calls; None for other nodes and for values that are no nodes."""
    return model.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


# Shared by calibration, profiling, weights and the example, which all walk graphs node by node.
def run_call(model: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Result of a node's call of a module, method or function on these arguments, or the attribute it reads."""
    if node.op == "get_attr":
        return read_attribute(model, str(node.target))
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
