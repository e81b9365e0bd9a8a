"""Registry of modules, functions and tensor methods: their operator and their quantized class; users add their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names
from torch_frontend.qmodules.ops import BY_NAME, Op

_Made = TypeVar("_Made", bound=type[nn.Module])
# A module class, a function, or the name of a tensor method.
Target = type[nn.Module] | Callable[..., Any] | str


@dataclass(frozen=True, eq=False)
class Entry:
    """The registration of one module class, function or method.

    op: the operator. params: names of its arguments in order. data: those that carry activations.
    qmodule: the class that replaces it; for a module class a subclass of it, for functions and methods a `Call`.
    """

    op: Op
    params: tuple[str, ...] = ("input",)
    data: tuple[str, ...] = ("input",)
    qmodule: type[nn.Module] | None = None


# Keys are classes and functions themselves: names would confuse users' functions with torch's.
_MODULES: dict[type[nn.Module], Entry] = {}
_FUNCTIONS: dict[Any, Entry] = {}
_METHODS: dict[str, Entry] = {}


def make_entry(op: str | Op, params: tuple[str, ...] = (), qmodule: type[nn.Module] | None = None) -> Entry:
    """An Entry; its data arguments are those of the operator, or the first ones where `params` has other names."""
    known = op if isinstance(op, Op) else _find_op(op)
    params = params or known.data or ("input",)
    # Functions such as torch.mm call their operands otherwise, in the same order.
    data = known.data if all(name in params for name in known.data) else params[: len(known.data)]
    return Entry(known, params, data, qmodule)


def register_target(target: Target, made: Entry) -> None:
    """Register a target; replaces an earlier registration."""
    if isinstance(target, str):
        _METHODS[target] = made
    elif isinstance(target, type) and issubclass(target, nn.Module):
        _MODULES[target] = made
    else:
        _FUNCTIONS[target] = made


def register_qmodule(*targets: Target, op: str | Op, params: tuple[str, ...] = ()) -> Callable[[_Made], _Made]:
    """Class decorator: the class replaces these modules, functions or tensor methods (given by name).

    For a module class it must be a subclass of it: modules are converted by changing their class, which keeps
    parameters, hooks and names. A layer whose operator has a weight inherits from `WeightQuantized`. For functions and
    methods it must be a subclass of `Call`. op: an operator's name, or an `Op` of your own. params: names of the call's
    arguments in order, where they differ from the operator's.

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
            register_target(target, make_entry(op, params, made))
        return made

    return decorate


def find_module_entry(module: nn.Module) -> Entry | None:
    """The entry of a module's class, or None."""
    # The exact class: a subclass may compute something else.
    return _MODULES.get(type(module))


def find_qmodule_entry(module: nn.Module) -> Entry | None:
    """The entry whose quantized class the module has, or None."""
    return next((found for found in _MODULES.values() if found.qmodule is type(module)), None)


def find_function_entry(function: Any) -> Entry | None:
    """The entry of a function, or None."""
    try:
        return _FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None


def find_method_entry(name: str) -> Entry | None:
    """The entry of a tensor method, or None."""
    return _METHODS.get(name)


def list_op_names() -> tuple[str, ...]:
    """Names of all operators, for rules and `multi_input`; sorted."""
    own = {e.op.name for table in (_MODULES, _FUNCTIONS, _METHODS) for e in table.values()}
    return tuple(sorted(own | set(BY_NAME)))


def _find_op(name: str) -> Op:
    if name not in BY_NAME:
        raise ConfigError(f"operator {name!r}", "is not known", suggest_names(name, BY_NAME), code="Q309")
    return BY_NAME[name]
