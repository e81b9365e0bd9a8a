"""Calls of a traced graph and their arguments: which value stands where, and putting another in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from onnxq.config import MultiInput
from torch_frontend.qmodules import Op
from torch_frontend.tracing.modules import name_arguments
from torch_frontend.tracing.names import CallName, is_constant, is_plain
from torch_frontend.tracing.values import is_float


@dataclass(frozen=True)
class Slot:
    """One place among a call's arguments: position or name, and the index inside where that is a list."""

    key: int | str
    item: int | None = None


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A call with its registration. module: None for functions and methods that are not registered.

    policy: the person's for the inputs of its operator.
    """

    node: fx.Node
    name: CallName
    module: nn.Module | None = None
    policy: MultiInput | None = None

    @property
    def op(self) -> Op:
        """The operator."""
        return self.name.entry.op

    @property
    def function(self) -> str:
        """The name of the function or method that is called; "" for layers."""
        # A function that is registered stands in the graph as a module that holds it.
        target = getattr(self.module, "target", "") if self.node.op == "call_module" else self.node.target
        return target if isinstance(target, str) else str(getattr(target, "__name__", ""))

    @property
    def reads_floats(self) -> bool:
        """False where data that it reads are integers."""
        # Only computed values can have a pair; the type of a parameter or number decides nothing.
        values = (value for param in self.name.entry.data for _, value in self.find_slots(param))
        return all(is_float(value) for value in values if not is_plain(value) and not is_constant(value))

    def find_slots(self, param: str) -> list[tuple[Slot, fx.Node]]:
        """The graph values that a parameter gets: none, one, or those of a list."""
        if param not in self.name.entry.params:
            return []
        # fx keeps arguments as the call passes them, by position or by name.
        position = self.name.entry.params.index(param)
        key: int | str = position if position < len(self.node.args) else param
        value = self.node.args[position] if isinstance(key, int) else self.node.kwargs.get(param)
        if isinstance(value, fx.Node):
            return [(Slot(key), value)]
        if isinstance(value, (list, tuple)):
            return [(Slot(key, k), item) for k, item in enumerate(value) if isinstance(item, fx.Node)]
        return []

    def find_setting(self, key: str, *names: str, default: Any = None) -> Any:
        """A setting of the call: the layer's attribute or the argument of this name. names: of its first arguments."""
        return getattr(self.module, key, name_arguments(self.node, *names).get(key, default))


def fill_slot(node: fx.Node, slot: Slot, value: fx.Node) -> None:
    """Put `value` into a slot."""
    held: Any = node.args[slot.key] if isinstance(slot.key, int) else node.kwargs[slot.key]
    new: Any = value
    if slot.item is not None:
        new = [value if k == slot.item else item for k, item in enumerate(held)]
    if isinstance(slot.key, int):
        node.update_arg(slot.key, new)
    else:
        node.update_kwarg(slot.key, new)
