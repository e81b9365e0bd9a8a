"""Arguments of a graph's calls: which value stands where, and putting another in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_frontend.qmodules import Entry


@dataclass(frozen=True)
class Slot:
    """One place among a call's arguments: position or name, and the index inside where that is a list."""

    key: int | str
    item: int | None = None


def find_slots(node: fx.Node, entry: Entry, param: str) -> list[tuple[Slot, fx.Node]]:
    """The graph values that a parameter gets: none, one, or those of a list."""
    if param not in entry.params:
        return []
    position = entry.params.index(param)
    key: int | str = position if position < len(node.args) else param
    value = node.args[position] if isinstance(key, int) else node.kwargs.get(param)
    if isinstance(value, fx.Node):
        return [(Slot(key), value)]
    if isinstance(value, (list, tuple)):
        return [(Slot(key, k), item) for k, item in enumerate(value) if isinstance(item, fx.Node)]
    return []


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
