"""Arguments that keep their default: fixed while tracing, and checked when the model runs."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.fx.node import has_side_effect

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


@has_side_effect  # else dead-code elimination removes the call: nothing reads its result
def require_default(value: Any, name: str, default: Any) -> None:
    """Raise DataError if an argument that was traced with its default has another value."""
    if value is not default and (type(value) is not type(default) or value != default):
        raise DataError(
            f"input {name!r}",
            f"is fixed at its default {default!r}, as it was traced",
            "give example_inputs that hold it",
            code="Q205",
        )
