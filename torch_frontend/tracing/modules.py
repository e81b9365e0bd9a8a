"""Modules, attributes and calls of a graph by their dotted paths; the arguments of a call."""

from functools import reduce
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

# fx puts a plain module in the place of one that a graph does not call, and `to` is a name of that one too.
_MISSING: Any = nn.Module()

# Of a call, by the names of its parameters.
Kwargs = dict[str, Any]
Args = tuple[Any, ...]


class Inputs(NamedTuple):
    """The arguments of one call of a model."""

    args: Args
    kwargs: Kwargs

    def run_model(self, model: nn.Module) -> Any:
        """Result of the model for these arguments."""
        return model(*self.args, **self.kwargs)


def as_inputs(batch: Any) -> Inputs:
    """Arguments of a batch: one tensor, a tuple or list of positions, or a mapping of names."""
    if isinstance(batch, dict):
        return Inputs((), batch)
    return Inputs(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})


def list_batches(data: Any) -> Any:
    """Batches of the data: a tensor or mapping is one batch, anything else is iterated over."""
    return [data] if isinstance(data, (Tensor, dict)) else data


def find_module(model: nn.Module, node: Any) -> nn.Module | None:
    """The module that a node calls; None for other nodes and for values that are no nodes."""
    return (
        model.get_submodule(str(node.target))
        if isinstance(node, fx.Node) and node.op == "call_module"
        else None
    )


def name_arguments(node: fx.Node, *names: str) -> Kwargs:
    """Name -> value of a call's arguments. names: of the first positions."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def read_key(key: Any) -> Any:
    """The index or name of one step of a path that pytree gives; None of other steps."""
    return getattr(key, "idx", getattr(key, "key", None))


def read_stack(node: fx.Node) -> Kwargs:
    """The modules whose forward makes a call, from the outermost to the innermost."""
    return node.meta.get("nn_module_stack") or {}


def call_module(model: fx.GraphModule, node: fx.Node, path: str, module: nn.Module) -> None:
    """Let a node call a new module in place of its function."""
    model.add_submodule(path, module)
    node.op = "call_module"
    node.target = path
    node.meta["nn_module_stack"] = {
        **read_stack(node),
        path: (path, type(module)),
    }


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


def make_unique_path(
    model: nn.Module, scope: str, base: str, taken: set[str] | frozenset[str] = frozenset()
) -> str:
    """`<scope>.<base>`, or the first of `<base>_1`, `<base>_2` … that is neither in the model nor in `taken`."""
    prefix = f"{scope}." if scope else ""
    name = f"{prefix}{base}"
    k = 0
    while name in taken or _exists(model, name):
        k += 1
        name = f"{prefix}{base}_{k}"
    return name


def _exists(model: nn.Module, path: str) -> bool:
    return (
        reduce(lambda at, part: getattr(at, part, _MISSING), path.split("."), model) is not _MISSING
    )
