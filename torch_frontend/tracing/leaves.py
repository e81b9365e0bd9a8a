"""Calls of layers kept whole in a graph that torch.export makes: markers around them, and a call in their place."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree


# An operator of its own: torch.export keeps it in the graph, whatever is done to the calls around it.
@torch.library.custom_op("onnxq::boundary", mutates_args=())
def mark_boundary(x: Tensor, call: int, index: int) -> Tensor:
    """A copy of the tensor. call: number of the layer's call. index: of an argument; results count from -1 down."""
    return x.clone()


@mark_boundary.register_fake
def _(x: Tensor, call: int, index: int) -> Tensor:
    return torch.empty_like(x)


@dataclass(eq=False)
class LeafCall:
    """One call of a layer. leaves: its flat arguments, None where a tensor stands. results: paths to its tensors.

    whole: False if an argument or a result has no form in a graph.
    """

    path: str
    leaves: list[Any]
    tensors: list[int]
    spec: Any
    results: list[tuple[Any, ...]]
    whole: bool = True


@contextmanager
def mark_leaves(model: nn.Module, is_leaf: Callable[[nn.Module, str], bool]) -> Iterator[list[LeafCall]]:
    """Run a block in which the outermost layers mark their arguments and results; gives their calls, as they come."""
    calls: list[LeafCall] = []
    # Of layers that are running: only the outermost is marked.
    stack: list[int] = []
    handles = []
    for path, module in model.named_modules():
        if path and is_leaf(module, path):
            handles.append(
                module.register_forward_pre_hook(partial(_mark_inputs, calls, stack, path), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(partial(_mark_results, calls, stack)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _mark_inputs(
    calls: list[LeafCall], stack: list[int], path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    stack.append(len(calls))
    if len(stack) > 1:
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    plain = [None if k in tensors else leaf for k, leaf in enumerate(leaves)]
    whole = all(isinstance(leaf, fx.node.base_types) or leaf is None for leaf in plain)
    number = len(calls)
    calls.append(LeafCall(path, plain, tensors, spec, [], whole))
    for k in tensors:
        leaves[k] = mark_boundary(leaves[k], number, k)
    return pytree.tree_unflatten(leaves, spec)


def _mark_results(calls: list[LeafCall], stack: list[int], module: nn.Module, args: Any, output: Any) -> Any:
    number = stack.pop()
    if stack:
        return None
    found, spec = pytree.tree_flatten_with_path(output)
    call = calls[number]
    keys = [tuple(getattr(key, "idx", getattr(key, "key", None)) for key in path) for path, _ in found]
    call.whole = call.whole and all(
        isinstance(leaf, Tensor) and None not in key for key, (_, leaf) in zip(keys, found, strict=True)
    )
    call.results = keys
    leaves = [
        mark_boundary(leaf, number, -1 - k) if isinstance(leaf, Tensor) else leaf for k, (_, leaf) in enumerate(found)
    ]
    return pytree.tree_unflatten(leaves, spec)


def restore_leaves(graph: fx.Graph, calls: list[LeafCall]) -> None:
    """Put one `call_module` in place of what stands between the markers of each call; remove all markers."""
    found: defaultdict[int, dict[int, fx.Node]] = defaultdict(dict)
    for node in graph.nodes:
        if node.target is torch.ops.onnxq.boundary.default:
            found[node.args[1]][node.args[2]] = node
    for number, call in enumerate(calls):
        marks = found[number]
        # A layer that does not read an argument leaves no marker of it.
        if call.whole and all(k in marks for k in call.tensors) and any(k < 0 for k in marks):
            _insert_call(graph, call, marks)
    for marks in found.values():
        for node in marks.values():
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _insert_call(graph: fx.Graph, call: LeafCall, marks: dict[int, fx.Node]) -> None:
    results = {k: node for k, node in marks.items() if k < 0}
    leaves = [marks[k].args[0] if k in call.tensors else leaf for k, leaf in enumerate(call.leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    order = {node: k for k, node in enumerate(graph.nodes)}
    first = min(results.values(), key=order.__getitem__)
    inside = [marks[k] for k in call.tensors]
    with graph.inserting_before(first):
        made = graph.create_node("call_module", call.path, args, kwargs)
        made.meta = {**first.meta}
        values = {}
        for k, node in results.items():
            value = made
            for key in call.results[-1 - k]:
                value = graph.call_function(operator.getitem, (value, key))
                value.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
            value.meta["val"] = node.meta.get("val")
            values[k] = value
    for k, node in results.items():
        node.replace_all_uses_with(values[k])
    # Backward, so that readers go before what they read; writes into buffers are the layer's own business.
    start = min(order[node] for node in inside) if inside else order[first]
    for node in sorted(
        (n for n in order if start < order[n] <= max(order[r] for r in results.values())),
        key=order.__getitem__,
        reverse=True,
    ):
        if not node.users and node not in marks.values() and _is_inside(node, call.path):
            graph.erase_node(node)


def _is_inside(node: fx.Node, path: str) -> bool:
    """True for what a module's forward calls."""
    return any(found == path for found, _ in (node.meta.get("nn_module_stack") or {}).values())
