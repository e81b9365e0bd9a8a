"""Arguments and results of an exported graph, which are flat, as the model's forward has them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from torch_frontend.tracing.arguments import PackOutputs, require_default, require_given, require_sizes
from torch_frontend.tracing.names import make_unique_path


def restore_signature(root: nn.Module, graph: fx.Graph, signature: inspect.Signature | None) -> None:
    """Give the graph the arguments of a forward and its kind of result, for flat ones.

    signature: None: that of the export.
    """
    info = graph._codegen.pytree_info  # type: ignore[attr-defined]
    signature = signature or _read_signature(info)
    flat = graph.find_nodes(op="placeholder")
    args, kwargs = pytree.tree_unflatten(flat, info.in_spec)
    bound = signature.bind(*args, **kwargs).arguments
    with graph.inserting_before(next(iter(graph.nodes))):
        inputs = _list_inputs(signature, bound)
        made = [graph.placeholder(name, default_value=default) for name, _, default in inputs]
    with graph.inserting_before((flat or made)[-1].next):
        for node, (name, value, default) in zip(made, inputs, strict=True):
            _connect_input(graph, node, name, value, default)
    for node in flat:
        graph.erase_node(node)
    graph.set_codegen(CodeGen())
    end = graph.output_node()
    leaves = pytree.tree_leaves(end.args[0])
    result = pytree.tree_unflatten(leaves, info.out_spec)
    if not _is_native(info.out_spec):
        path = make_unique_path(root, "", "pack_outputs")
        root.add_module(path, PackOutputs(info.out_spec))
        with graph.inserting_before(end):
            result = graph.create_node("call_module", path, (leaves,))
    end.args = (result,)


def _read_signature(info: Any) -> inspect.Signature:
    """The arguments by which an exported module is called."""
    args, kwargs = info.in_spec.children()
    names = [*info.orig_args[: args.num_children], *kwargs.context]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def _list_inputs(signature: inspect.Signature, bound: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value in the exported graph, default) of every argument; `empty` where there is none."""
    empty = inspect.Parameter.empty
    found: list[tuple[str, Any, Any]] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found += [(f"{name}_{k}", value, empty) for k, value in enumerate(bound.get(name, ()))]
        elif parameter.kind is parameter.VAR_KEYWORD:
            # Behind arguments that have defaults all must have one.
            found += [(key, value, None) for key, value in bound.get(name, {}).items()]
        else:
            found.append((name, bound.get(name, empty), parameter.default))
    return found


def _connect_input(graph: fx.Graph, node: fx.Node, name: str, value: Any, default: Any) -> None:
    """Let readers of an input of the exported graph read an argument of the forward, or a part of it."""
    if value is inspect.Parameter.empty:
        graph.call_function(require_default, (node, name, default))
        return
    for path, flat in pytree.tree_flatten_with_path(value)[0]:
        held, at = flat.meta.get("val"), node
        for key in path:
            inside = isinstance(key, pytree.GetAttrKey)
            at = graph.call_function(
                getattr if inside else operator.getitem,
                (at, key.name if inside else getattr(key, "idx", getattr(key, "key", None))),
            )
        if not isinstance(held, (Tensor, torch.SymInt)):
            graph.call_function(require_default, (at, name, held))
        elif default is not inspect.Parameter.empty:
            graph.call_function(require_given, (node, name))
        if isinstance(held, Tensor):
            graph.call_function(require_sizes, (at, f"{name}{pytree.keystr(path)}", read_sizes(held)))
        at.meta["val"] = held
        flat.replace_all_uses_with(at)


def read_sizes(tensor: Tensor) -> tuple[int | None, ...]:
    """Sizes of a tensor of torch.export; None for those that may change from call to call."""
    return tuple(int(size) if is_concrete_int(size) else None for size in tensor.shape)


def _is_native(spec: Any) -> bool:
    """True for results of tuples, lists and dicts, which a graph can make."""
    return spec.is_leaf() or (spec.type in (tuple, list, dict) and all(map(_is_native, spec.children())))
