"""A graph of calls in ONNX's operators and layouts: the form in which the planner reads a torch module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor, fx

from onnxq.graph import Graph, NodeRef, ValueInfo
from onnxq.sites import Edge, TensorId, Unquantized
from torch_frontend.placement.slots import Slot
from torch_frontend.qmodules import Op

# An argument of a call: what reads, and where.
Argument = tuple[fx.Node, Slot]


@dataclass(frozen=True, kw_only=True)
class CallNode(NodeRef):
    """A node of a call. path: the module that is called, as rules name it. op: torch's operator.

    call: the call's own name, one of several with this path. function: the function or method that is called.
    """

    path: str
    op: Op = field(compare=False)
    call: str = ""
    function: str = ""


def read_call(node: NodeRef) -> CallNode:
    """The node itself, for the planner's questions, which know it by its base class only."""
    assert isinstance(node, CallNode)
    return node


@dataclass(frozen=True, eq=False)
class Weight:
    """The weight of a call. module: the layer that holds it; else `argument` gets the graph's value.

    transposed: the node reads it transposed.
    """

    site: str
    transposed: bool = False
    module: str = ""
    value: fx.Node | None = None
    argument: Argument | None = None


@dataclass(eq=False)
class CallGraph(Graph):
    """The planner's graph protocol over torch calls. Tensors are called like their sites.

    constants: parameters and tensors computed from them, in the layout of the node that reads them.
    values: tensors that may have a pair -> the graph's value, None where there is no graph. arguments: node input ->
    the argument that it stands for. weights: node -> its weight. closed: nodes that nothing can be placed at, for
    instance inside a fused call. reasons: why.
    """

    inputs: tuple[ValueInfo, ...] = ()
    # A trace has followed one way through all control flow, so there are no bodies.
    scopes: tuple[str, ...] = ("",)
    outputs: set[str] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[TensorId, tuple[int, ...]] = field(default_factory=dict)
    integers: set[str] = field(default_factory=set)
    values: dict[str, fx.Node | None] = field(default_factory=dict)
    arguments: dict[tuple[str, int], Argument] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    reasons: list[Unquantized] = field(default_factory=list)
    _by_name: dict[str, CallNode] = field(default_factory=dict)
    _producers: dict[str, CallNode] = field(default_factory=dict)
    _consumers: defaultdict[str, list[Edge]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self, name: str, op_type: str, inputs: Iterable[str], outputs: Iterable[str], *, path: str, op: Op,
        call: str = "", function: str = "", **attrs: Any,
    ) -> None:  # fmt: skip
        """Append a node; its inputs are made before it."""
        node = CallNode(
            name=name, op_type=op_type, domain="", inputs=tuple(inputs), outputs=tuple(outputs), attrs=attrs, scope="",
            order=len(self._by_name), path=path, op=op, call=call or path, function=function,
        )  # fmt: skip
        self._by_name[name] = node
        self._producers.update(dict.fromkeys(node.outputs, node))
        for k, tensor in enumerate(node.inputs):
            self._consumers[tensor].append(Edge(name, k))

    @property
    def nodes(self) -> tuple[CallNode, ...]:
        """All nodes in the order in which they run."""
        return tuple(self._by_name.values())

    def node(self, name: str) -> CallNode:
        """The node of this name."""
        return self._by_name[name]

    def resolve(self, tensor: str, scope: str) -> TensorId | None:
        """The tensor of this name; there is one scope."""
        return TensorId(tensor) if tensor else None

    def producer(self, t: TensorId | None) -> CallNode | None:
        """The node that makes the tensor."""
        return None if t is None else self._producers.get(t.name)

    def consumers(self, t: TensorId | None) -> tuple[Edge, ...]:
        """Every node input that reads the tensor."""
        return () if t is None else tuple(self._consumers.get(t.name, ()))

    def is_output(self, t: TensorId | None) -> bool:
        """True when the module returns the tensor."""
        return t is not None and t.name in self.outputs

    def is_constant(self, t: TensorId | None) -> bool:
        """True for parameters and tensors computed from them alone."""
        return t is not None and t.name in self.constants

    def constant(self, t: TensorId | None) -> NDArray[Any] | None:
        """The value of a constant."""
        found = None if t is None else self.constants.get(t.name)
        # Engines' rules look at values, not at the type and device that training takes.
        return None if found is None else np.asarray(found.detach().float().cpu())

    def shape(self, t: TensorId | None) -> tuple[int | str | None, ...] | None:
        """The shape of a constant; of computed tensors an example shows it, which is given beside the graph."""
        found = None if t is None else self.constants.get(t.name)
        return None if found is None else tuple(found.shape)

    def dtype(self, t: TensorId | None) -> int:
        """int64 for integers; float32, which engines compute in, for any other type that may be one."""
        return TensorProto.INT64 if t is not None and t.name in self.integers else TensorProto.FLOAT
