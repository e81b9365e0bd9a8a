"""Arguments and results of a forward: those fixed while tracing are checked in each run; flat ones are packed again."""

import inspect
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.fx.graph import CodeGen
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from onnxq.errors import DataError
from torch_frontend.tracing.modules import Inputs, Kwargs, make_unique_path, read_key


def find_fixed_arguments(model: nn.Module, arguments: Collection[str] | None) -> Kwargs:
    """Name -> default of the forward's arguments that will not be passed.

    arguments: names of those that will be passed; None: all without a default.
    """
    # A graph has no `if mask is None`: an argument that is passed only sometimes cannot be traced.
    passed = set(arguments or ())
    return {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in passed
    }


def find_given_arguments(model: nn.Module, inputs: Inputs) -> Kwargs:
    """Name -> value of the forward's arguments that differ from their defaults.

    Raises DataError if the arguments do not fit the forward.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*inputs.args, **inputs.kwargs).arguments
    except TypeError as error:
        cause = f"do not fit the model's forward: {error}"
        raise DataError("example_inputs", cause, "give one batch", code="Q205") from error
    return {
        name: value
        for name, value in bound.items()
        if value is not signature.parameters[name].default
    }


def _record_check(check: Any, value: Any, *args: Any) -> bool:
    """True where a graph is traced again, as for a pickled one: the check goes into the new graph."""
    if isinstance(value, fx.Proxy):
        value.tracer.create_proxy("call_function", check, (value, *args), {})
    return isinstance(value, fx.Proxy)


@has_side_effect  # else dead-code elimination removes the call: nothing reads its result
def require_default(value: Any, name: str, default: Any) -> None:
    """Raise DataError if an argument that was traced with its default has another value."""
    if _record_check(require_default, value, name, default):
        return
    # Without the types True would equal 1, and 1 equal 1.0.
    if value is not default and (type(value) is not type(default) or value != default):
        raise DataError(
            f"input {name!r}",
            f"is fixed at its default {default!r}, as it was traced",
            "give example_inputs that hold it",
            code="Q205",
        )


@has_side_effect
def require_given(value: Any, name: str) -> None:
    """Raise DataError if an argument that was traced with a value is missing."""
    if _record_check(require_given, value, name):
        return
    if value is None:
        raise DataError(
            f"input {name!r}",
            "is missing: example_inputs have it",
            "give it by position or name",
            code="Q207",
        )


@has_side_effect
def require_sizes(value: Any, name: str, sizes: tuple[int | None, ...]) -> None:
    """Raise DataError if a tensor has another rank, or another size where that became a constant of the graph.

    sizes: by dimension; None: any.
    """
    if _record_check(require_sizes, value, name, sizes) or not isinstance(value, Tensor):
        return
    if value.dim() != len(sizes):
        cause = f"has {value.dim()} dimensions, and was captured with {len(sizes)}"
    else:
        # Only these are compared: a comparison would make a constant of any other size, where a compiler looks on.
        wrong = [k for k, size in enumerate(sizes) if size is not None and value.shape[k] != size]
        if not wrong:
            return
        cause = f"has {value.shape[wrong[0]]} at dimension {wrong[0]}, and was captured with {sizes[wrong[0]]}"
    fix = "give example_inputs of this size: torch.export found that what is computed depends on it"
    raise DataError(f"input {name!r}", cause, fix, code="Q209")


# Calls in a graph that give nothing.
CHECKS = (require_default, require_given, require_sizes)


class PackOutputs(nn.Module):
    """Makes the model's own kind of result of its tensors, for instance a data class."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        # Numbers in the places of tensors: torch warns of copies of its own specification.
        self.form = pytree.tree_unflatten(range(spec.num_leaves), spec)

    def forward(self, leaves: list[Any]) -> Any:
        """The result of which these are the leaves."""
        return pytree.tree_unflatten(leaves, pytree.tree_structure(self.form))


def restore_signature(
    root: nn.Module, graph: fx.Graph, signature: inspect.Signature | None
) -> None:
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
        placeholders = [
            graph.placeholder(name, default_value=default) for name, _, default in inputs
        ]
    with graph.inserting_before((flat or placeholders)[-1].next):
        for node, (name, value, default) in zip(placeholders, inputs, strict=True):
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
    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )


def _list_inputs(signature: inspect.Signature, bound: Kwargs) -> list[tuple[str, Any, Any]]:
    """(name, value in the exported graph, default) of every argument; `empty` where there is none."""
    empty = inspect.Parameter.empty
    inputs: list[tuple[str, Any, Any]] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            inputs += [(f"{name}_{k}", value, empty) for k, value in enumerate(bound.get(name, ()))]
        elif parameter.kind is parameter.VAR_KEYWORD:
            # Behind arguments that have defaults all must have one.
            inputs += [(key, value, None) for key, value in bound.get(name, {}).items()]
        else:
            inputs.append((name, bound.get(name, empty), parameter.default))
    return inputs


def _connect_input(graph: fx.Graph, node: fx.Node, name: str, value: Any, default: Any) -> None:
    """Let readers of an input of the exported graph read an argument of the forward, or a part of it."""
    if value is inspect.Parameter.empty:
        graph.call_function(require_default, (node, name, default))
        return
    for path, flat in pytree.tree_flatten_with_path(value)[0]:
        example = flat.meta.get("val")
        at = node
        for key in path:
            inside = isinstance(key, pytree.GetAttrKey)
            at = graph.call_function(
                getattr if inside else operator.getitem,
                (at, key.name if inside else read_key(key)),
            )
        if not isinstance(example, (Tensor, torch.SymInt)):
            graph.call_function(require_default, (at, name, example))
        elif default is not inspect.Parameter.empty:
            graph.call_function(require_given, (node, name))
        if isinstance(example, Tensor):
            graph.call_function(
                require_sizes, (at, f"{name}{pytree.keystr(path)}", read_sizes(example))
            )
        at.meta["val"] = example
        flat.replace_all_uses_with(at)


def read_sizes(tensor: Tensor) -> tuple[int | None, ...]:
    """Sizes of a tensor of torch.export; None for those that may change from call to call."""
    return tuple(int(size) if is_concrete_int(size) else None for size in tensor.shape)


def _is_native(spec: Any) -> bool:
    """True for results of tuples, lists and dicts, which a graph can make."""
    return spec.is_leaf() or (
        spec.type in (tuple, list, dict) and all(map(_is_native, spec.children()))
    )
