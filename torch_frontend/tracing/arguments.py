"""Arguments and results of a traced forward: what is fixed while tracing is checked when the model runs."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from onnxq.errors import DataError


def find_fixed_arguments(model: nn.Module, given: Collection[str] | None) -> dict[str, Any]:
    """Name -> default of the forward's arguments that will not be passed.

    given: names of those that will be passed; None: all without a default.
    """
    # A graph has no `if mask is None`: an argument that is passed only sometimes cannot be traced.
    passed = set(given or ())
    return {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in passed
    }


def find_given_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of the forward's arguments that differ from their defaults.

    Raises DataError if the arguments do not fit the forward.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise DataError(
            "example_inputs", f"do not fit the model's forward: {error}", "give one batch", code="Q205"
        ) from error
    return {name: value for name, value in bound.items() if value is not signature.parameters[name].default}


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
            f"input {name!r}", "is missing: example_inputs have it", "give it by position or name", code="Q207"
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
