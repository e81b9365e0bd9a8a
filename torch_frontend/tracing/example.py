"""Shapes and types while tracing, from the user's example: loops over shapes and `if` on them can then be followed.

Every call is made once more on tensors without data (torch's fake tensors), so nothing is computed or changed. What
depends on values stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.proxy import Attribute
from torch.utils import _pytree as pytree

_FAKE = "onnxq_fake"
_UNKNOWN = object()


class KnowingProxy(fx.Proxy):
    """A proxy that knows its length where the example shows it."""

    def __len__(self) -> int:
        known = known_of(self)
        return super().__len__() if known is _UNKNOWN else len(known)

    def __getattr__(self, name: str) -> KnowingAttribute:
        return KnowingAttribute(self, name)


class KnowingAttribute(Attribute):
    """The same for attributes: len(x.shape)."""

    __len__ = KnowingProxy.__len__
    __getattr__ = KnowingProxy.__getattr__


def known_of(proxy: fx.Proxy) -> Any:
    """What the example gives here; _UNKNOWN where it gives nothing."""
    return proxy.node.meta.get(_FAKE, _UNKNOWN)


class Example:
    """The example's values, call by call. given: argument -> value."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.given = pytree.tree_map(self._fake, dict(given))
        self.running = False
        self.specialised: dict[str, None] = {}

    def _fake(self, value: Any) -> Any:
        return self.mode.from_tensor(value) if isinstance(value, Tensor) else value

    def follow(self, root: nn.Module, node: fx.Node) -> None:
        """Make the node's call on the values its arguments have."""
        if self.running or node.op == "output":
            return
        sources = node.all_input_nodes
        if any(source.meta.get(_FAKE, _UNKNOWN) is _UNKNOWN for source in sources):
            return
        self.running = True
        try:
            with self.mode, torch.no_grad():
                node.meta[_FAKE] = self._value(root, node)
        except Exception:  # what cannot run without data is unknown
            node.meta.pop(_FAKE, None)
        finally:
            self.running = False

    def _value(self, root: nn.Module, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.given.get(str(node.target).lstrip("*"), node.args[0] if node.args else _UNKNOWN)
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            return getattr(root.get_submodule(owner), leaf)
        args = fx.map_arg(node.args, lambda n: n.meta[_FAKE])
        kwargs = fx.map_arg(node.kwargs, lambda n: n.meta[_FAKE])
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            with _evaluated(module):
                return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def truth(self, proxy: fx.Proxy, scope: str) -> bool | None:
        """What an `if` on sizes, types and the like finds in the example; None where it depends on values."""
        known = known_of(proxy)
        if known is _UNKNOWN or isinstance(known, Tensor):
            return None
        self.specialised[scope] = None
        return bool(known)

    def items(self, proxy: fx.Proxy, scope: str) -> Iterator[fx.Proxy] | None:
        """The elements of what a loop or a * goes over; None where their number is unknown."""
        known = known_of(proxy)
        if known is _UNKNOWN or not isinstance(known, (Tensor, tuple, list)):
            return None
        self.specialised[scope] = None
        return iter([proxy[k] for k in range(len(known))])


def forget(graph: fx.Graph) -> None:
    """Take the example's values off the graph."""
    for node in graph.nodes:
        node.meta.pop(_FAKE, None)


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        for inner, _ in modes:
            inner.training = False
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode
