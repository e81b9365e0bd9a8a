"""Function and method calls as modules, which have a name; models that cannot be traced use them by hand."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn


class Call(nn.Module):
    """A function or tensor method as a module. target: the function, or the method's name."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the function or method for these arguments."""
        # Tensor methods by name: their self is the first argument, as in a graph.
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The state with the function as (module, name), where it has one."""
        # torch makes some functions that pickle cannot name.
        return {**self.__dict__, "target": _find_reference(self.target)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        reference = state["target"]
        target = (
            getattr(importlib.import_module(reference[0]), reference[1])
            if isinstance(reference, tuple)
            else reference
        )
        super().__setstate__({**state, "target": target})

    def extra_repr(self) -> str:
        """The method as `.name`, or the function's name."""
        return (
            f".{self.target}"
            if isinstance(self.target, str)
            else getattr(self.target, "__name__", "?")
        )


def _find_reference(target: Any) -> Any:
    """(module, name) of a function; the target itself if it is not found."""
    # The modules whose functions the registry knows.
    for place in ("torch.nn.functional", "torch", "operator"):
        for name, value in vars(importlib.import_module(place)).items():
            if value is target:
                return place, name
    return target


class Add(nn.Module):
    """input + other as a module, which is quantized also in models that cannot be traced."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """The sum."""
        return torch.add(input, other)


class Mul(nn.Module):
    """input * other, as a module."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """The product of the elements."""
        return torch.mul(input, other)


class MatMul(nn.Module):
    """input @ other, as a module."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """The matrix product."""
        return torch.matmul(input, other)


class Cat(nn.Module):
    """torch.cat along `dim` as a module."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """The concatenated tensors."""
        return torch.cat(tensors, self.dim)
