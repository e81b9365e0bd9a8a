"""Registry of modules, functions and tensor methods: their operator and their quantized class; users add their own."""

import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from onnxq.config.document import parse_yaml
from onnxq.errors import CauseAndFix, ConfigError, suggest_names
from onnxq.sites import Names
from torch_frontend.qmodules import calls


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator.

    name: its name in `torch.multi_input` and rules. onnx: op types it becomes, so that rules written for ONNX hold too.
    data: names of the arguments that carry activations. weight: the argument or attribute with the weight;
    weight_axis: its output-channel axis; block_axis: the axis of blocks. channel: the channel axis of activations.
    moves: results are values of the input, all or some, so that they need no quantization of their own.
    refused: (reason, fix) where it always stays float and computes enough to matter.
    """

    name: str
    onnx: Names = ()
    data: Names = ("input",)
    weight: str | None = None
    weight_axis: int = 0
    block_axis: int = 1
    channel: int = 1
    moves: bool = False
    refused: CauseAndFix | None = None


_Made = TypeVar("_Made", bound=type[nn.Module])
# A module class, a function, or the name of a tensor method. The full name of a class of a library that may be absent
# counts where modules are converted one by one; in a graph its forward is traced.
Target = type[nn.Module] | Callable[..., Any] | str


@dataclass(frozen=True, eq=False)
class Registration:
    """The registration of one module class, function or method.

    op: the operator. params: names of its arguments in order. data: those that carry activations.
    qmodule: the class that replaces it; for a module class a subclass of it, for functions and methods a `Call`.
    """

    op: Op
    params: Names = ()
    data: Names = ()
    qmodule: type[nn.Module] | None = None


# Of calls that nothing is known of.
UNKNOWN = Registration(Op(name=""))


# Keys are classes and functions themselves, since names would confuse users' functions with torch's; methods are names.
_ENTRIES: dict[Any, Registration] = {}
# By name.
OPS: dict[str, Op] = {}
_DATA = parse_yaml(
    Path(__file__).with_name("operators.yaml").read_text("utf-8"), "operators.yaml"
).values
# Name -> operators or functions; operators that run as one kernel behind another; functions -> ONNX's nodes.
GROUPS = {name: frozenset(group) for name, group in _DATA["groups"].items()}
FUSED = {name: frozenset(group) for name, group in _DATA["fused"].items()}
FUNCTION_NODES: Mapping[str, str] = _DATA["nodes"]


def register_targets(
    *targets: Target, op: str | Op, params: Names = (), qmodule: type[nn.Module] | None = None
) -> None:
    """Register module classes, functions or tensor methods (by name) for an operator; replaces earlier registrations.

    The data arguments are those of the operator, or the first ones where `params` has other names.
    """
    known = op if isinstance(op, Op) else _find_op(op)
    params = params or known.data or ("input",)
    # Functions such as torch.mm call their operands otherwise, in the same order.
    data = known.data if all(name in params for name in known.data) else params[: len(known.data)]
    _ENTRIES.update(dict.fromkeys(targets, Registration(known, params, data, qmodule)))


def register_qmodule(
    *targets: Target, op: str | Op, params: Names = ()
) -> Callable[[_Made], _Made]:
    """Class decorator: the class replaces these modules, functions or tensor methods (given by name).

    For a module class it must be a subclass of it: modules are converted by changing their class, which keeps
    parameters, hooks and names. A layer whose operator has a weight inherits from `WeightQuantized`. For functions and
    methods it must be a subclass of `Call`. op: an operator's name, or an `Op` of your own. params: names of the call's
    arguments in order, where they differ from the operator's.

        @register_qmodule(my_swish, op="silu")
        class QSwish(Call): ...

    Raises ConfigError for an unknown operator or a class that does not fit.
    """

    def decorate(qmodule: _Made) -> _Made:
        for target in targets:
            if (
                isinstance(target, type)
                and issubclass(target, nn.Module)
                and not issubclass(qmodule, target)
            ):
                raise ConfigError(
                    f"qmodule {qmodule.__name__}",
                    f"is no subclass of {target.__name__}",
                    "derive it",
                    code="Q310",
                )
        register_targets(*targets, op=op, params=params, qmodule=qmodule)
        return qmodule

    return decorate


def find_entry(target: Any) -> Registration | None:
    """The entry of a module class, a function or the name of a tensor method; None where nothing is known of it."""
    # torch makes a class for each parametrized layer, which computes as the layer's own.
    if isinstance(target, type) and target.__module__ == parametrize.__name__:
        target = target.__base__
    # The exact class: a subclass may compute something else.
    return _ENTRIES.get(target) if isinstance(target, Hashable) else None


def find_layer(module: nn.Module) -> Registration | None:
    """The entry of a module that is converted alone, not in a graph: its class may be registered by its full name."""
    return find_entry(type(module)) or _ENTRIES.get(
        f"{type(module).__module__}.{type(module).__qualname__}"
    )


def list_op_names() -> Names:
    """Names of all operators, for rules and `multi_input`; sorted."""
    return tuple(sorted({entry.op.name for entry in _ENTRIES.values()} | set(OPS)))


def _find_op(name: str) -> Op:
    if name not in OPS:
        raise ConfigError(
            f"operator {name!r}", "is not known", suggest_names(name, OPS), code="Q309"
        )
    return OPS[name]


def _register_operators() -> None:
    """Register the operators of operators.yaml, and the calls of torch that it lists."""
    for name, fields in _DATA["operators"].items():
        targets = fields.pop("calls", [])
        renamed = fields.pop("renamed", [])
        values = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        OPS[name] = Op(name=name, **values)
        register_targets(*map(_find_target, targets), op=name)
        for other in renamed:
            register_targets(
                *map(_find_target, other["calls"]), op=name, params=tuple(other["params"])
            )


def _find_target(name: str) -> Target:
    """The class or function of a dotted name in operators.yaml; of a method, which begins with a dot, its name."""
    place, _, own = name.rpartition(".")
    return getattr(_PLACES[place], own) if place else own


_PLACES: Mapping[str, Any] = {
    "nn": nn,
    "F": functional,
    "torch": torch,
    "operator": operator,
    "own": calls,
}
_register_operators()
