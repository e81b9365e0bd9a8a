"""Which module, function or method is which operator, and what takes its place; users add their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from onnxq.errors import ConfigError
from onnxq.nearest import did_you_mean
from torch_frontend.qmodules.ops import BY_NAME, Op

_Made = TypeVar("_Made", bound=type[nn.Module])
# A module class, a function, or a method of tensors by name.
Target = type[nn.Module] | Callable[..., Any] | str


@dataclass(frozen=True, eq=False)
class Entry:
    """op: the operator. params: its arguments in order, by name. data: those that carry activations.

    qmodule: what takes its place; for a module class a subclass of it, for functions and methods a `Call`.
    """

    op: Op
    params: tuple[str, ...] = ("input",)
    data: tuple[str, ...] = ("input",)
    qmodule: type[nn.Module] | None = None


_MODULES: dict[type[nn.Module], Entry] = {}
_FUNCTIONS: dict[Any, Entry] = {}
_METHODS: dict[str, Entry] = {}


def entry(op: str | Op, params: tuple[str, ...] = (), qmodule: type[nn.Module] | None = None) -> Entry:
    """An Entry whose data arguments are the operator's, or where it names them otherwise its first ones."""
    known = op if isinstance(op, Op) else _op(op)
    params = params or known.data or ("input",)
    data = known.data if all(name in params for name in known.data) else params[: len(known.data)]
    return Entry(known, params, data, qmodule)


def put(target: Target, made: Entry) -> None:
    """Enter a target; what was there before goes."""
    if isinstance(target, str):
        _METHODS[target] = made
    elif isinstance(target, type) and issubclass(target, nn.Module):
        _MODULES[target] = made
    else:
        _FUNCTIONS[target] = made


def register_qmodule(*targets: Target, op: str | Op, params: tuple[str, ...] = ()) -> Callable[[_Made], _Made]:
    """Class decorator: the class takes the place of these modules, functions or tensor methods (given by name).

    For a module class it must be a subclass of it: modules are converted by changing their class, so that parameters,
    hooks and names stay. A layer whose operator has a weight inherits from `WeightQuantized`. For functions and
    methods it must be a subclass of `Call`. op: an operator's name, or an `Op` of your own. params: the call's
    arguments in order, where they are not those of the operator.

        @register_qmodule(my_swish, op="silu")
        class QSwish(Call): ...

    Raises ConfigError for an unknown operator or a class that does not fit.
    """

    def decorate(made: _Made) -> _Made:
        for target in targets:
            is_module = isinstance(target, type) and issubclass(target, nn.Module)
            if is_module and not issubclass(made, target):  # type: ignore[arg-type]
                raise ConfigError(
                    f"qmodule {made.__name__}", f"is no subclass of {target.__name__}", "derive it", code="Q310"
                )
            put(target, entry(op, params, made))
        return made

    return decorate


def of_module(module: nn.Module) -> Entry | None:
    """The entry of a module by its exact class: a subclass may compute something else."""
    return _MODULES.get(type(module))


def of_qmodule(module: nn.Module) -> Entry | None:
    """The entry whose quantized class the module has."""
    return next((found for found in _MODULES.values() if found.qmodule is type(module)), None)


def of_function(function: Any) -> Entry | None:
    """The entry of a function."""
    try:
        return _FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None


def of_method(name: str) -> Entry | None:
    """The entry of a tensor method."""
    return _METHODS.get(name)


def op_names() -> tuple[str, ...]:
    """All operators that rules and `multi_input` may name."""
    own = {e.op.name for table in (_MODULES, _FUNCTIONS, _METHODS) for e in table.values()}
    return tuple(sorted(own | set(BY_NAME)))


def _op(name: str) -> Op:
    if name not in BY_NAME:
        raise ConfigError(f"operator {name!r}", "is not known", did_you_mean(name, BY_NAME), code="Q309")
    return BY_NAME[name]
