"""Function and method calls as modules: they get a name, and models that cannot be traced can use them by hand."""

from __future__ import annotations

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
        """What the function or method gives for these arguments."""
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Functions by where they are found: torch makes some that pickle cannot name."""
        return {**self.__dict__, "target": _reference(self.target)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state["target"]
        found = getattr(importlib.import_module(held[0]), held[1]) if isinstance(held, tuple) else held
        super().__setstate__({**state, "target": found})

    def extra_repr(self) -> str:
        """The call's target."""
        return f".{self.target}" if isinstance(self.target, str) else getattr(self.target, "__name__", "?")


def _reference(target: Any) -> Any:
    for place in ("torch.nn.functional", "torch", "operator"):
        for name, value in vars(importlib.import_module(place)).items():
            if value is target:
                return place, name
    return target


class Add(nn.Module):
    """input + other, as a module: quantizable also where a model cannot be traced."""

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
    """torch.cat as a module; dim is said once."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """The tensors one behind the other."""
        return torch.cat(tensors, self.dim)
