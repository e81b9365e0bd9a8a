"""Shapes and types while tracing, from the user's example, so that loops and `if` on shapes can be followed.

Every call is repeated on tensors without data (torch's fake tensors), so nothing is computed or changed. Results that
depend on values stay unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.proxy import Attribute
from torch.utils import _pytree as pytree

from torch_frontend.tracing.modules import find_module, run_call
from torch_frontend.tracing.values import use_eval_mode

# Key of a node's meta, there while tracing only.
_FAKE = "onnxq_fake"
_UNKNOWN = object()


class KnowingProxy(fx.Proxy):
    """A proxy with the length of its value in the example."""

    def __len__(self) -> int:
        known = read_example_value(self)
        return super().__len__() if known is _UNKNOWN else len(known)

    def __getattr__(self, name: str) -> KnowingAttribute:
        return KnowingAttribute(self, name)


class KnowingAttribute(Attribute):
    """The same for attributes, as in len(x.shape)."""

    __len__ = KnowingProxy.__len__
    __getattr__ = KnowingProxy.__getattr__


def read_example_value(proxy: fx.Proxy) -> Any:
    """The proxy's value in the example, or _UNKNOWN."""
    return proxy.node.meta.get(_FAKE, _UNKNOWN)


class Example:
    """Values of the example, call by call.

    given: argument -> value. specialised: scopes whose control flow the example has decided, as ordered keys.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        # Parameters stay real tensors: only their shapes are read.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.given = pytree.tree_map(self._fake, dict(given))
        # True while a call is repeated; the tracer must not record these calls.
        self.running = False
        self.specialised: dict[str, None] = {}

    def _fake(self, value: Any) -> Any:
        return self.mode.from_tensor(value) if isinstance(value, Tensor) else value

    def follow(self, root: nn.Module, node: fx.Node) -> None:
        """Repeat the node's call on the example's values of its arguments."""
        if self.running or node.op == "output":
            return
        sources = node.all_input_nodes
        if any(source.meta.get(_FAKE, _UNKNOWN) is _UNKNOWN for source in sources):
            return
        self.running = True
        try:
            with self.mode, torch.no_grad():
                node.meta[_FAKE] = self._value(root, node)
        except Exception:  # the call needs data: its result is unknown
            node.meta.pop(_FAKE, None)
        finally:
            self.running = False

    def _value(self, root: nn.Module, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.given.get(str(node.target).lstrip("*"), node.args[0] if node.args else _UNKNOWN)
        args, kwargs = (fx.map_arg(part, lambda n: n.meta[_FAKE]) for part in (node.args, node.kwargs))
        module = find_module(root, node)
        # In training mode a batch norm would write into its averages.
        with nullcontext() if module is None else use_eval_mode(module):
            return run_call(root, node, args, kwargs)

    def truth(self, proxy: fx.Proxy, scope: str) -> bool | None:
        """Outcome of an `if` on sizes, types and the like in the example; None where it depends on values."""
        known = read_example_value(proxy)
        if known is _UNKNOWN or isinstance(known, Tensor):
            return None
        self.specialised[scope] = None
        return bool(known)

    def items(self, proxy: fx.Proxy, scope: str) -> Iterator[fx.Proxy] | None:
        """Elements of a value that a loop or a * iterates over; None where their number is unknown."""
        known = read_example_value(proxy)
        if known is _UNKNOWN or not isinstance(known, (Tensor, tuple, list)):
            return None
        self.specialised[scope] = None
        return iter([proxy[k] for k in range(len(known))])


def forget_example(graph: fx.Graph) -> None:
    """Remove the example's values from the graph."""
    for node in graph.nodes:
        node.meta.pop(_FAKE, None)
