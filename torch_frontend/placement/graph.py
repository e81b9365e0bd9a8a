"""A graph of calls in ONNX's operators and layouts: the form in which the planner reads a torch module."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import Tensor, fx, nn

from onnxq.arrays import Array, Shape
from onnxq.config import MultiInput
from onnxq.graph import Dims, Graph, NodeRef, ValueInfos
from onnxq.sites import Edge, Edges, MaybeTensor, Names, TensorId, Unquantized
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
        target = (
            getattr(self.module, "target", "")
            if self.node.op == "call_module"
            else self.node.target
        )
        return target if isinstance(target, str) else str(getattr(target, "__name__", ""))

    @property
    def reads_floats(self) -> bool:
        """False where data that it reads are integers."""
        # Only computed values can have a pair; the type of a parameter or number decides nothing.
        values = (value for param in self.name.entry.data for _, value in self.find_slots(param))
        return all(
            is_float(value) for value in values if not is_plain(value) and not is_constant(value)
        )

    def find_slots(self, param: str) -> list[tuple[Slot, fx.Node]]:
        """The graph values that a parameter gets: none, one, or those of a list."""
        if param not in self.name.entry.params:
            return []
        # fx keeps arguments as the call passes them, by position or by name.
        position = self.name.entry.params.index(param)
        key = position if position < len(self.node.args) else param
        value = self.node.args[position] if isinstance(key, int) else self.node.kwargs.get(param)
        if isinstance(value, fx.Node):
            return [(Slot(key), value)]
        if isinstance(value, (list, tuple)):
            return [
                (Slot(key, k), item) for k, item in enumerate(value) if isinstance(item, fx.Node)
            ]
        return []

    def find_setting(self, key: str, *names: str, default: Any = None) -> Any:
        """A setting of the call: the layer's attribute or the argument of this name. names: of its first arguments."""
        return getattr(self.module, key, name_arguments(self.node, *names).get(key, default))


def fill_slot(node: fx.Node, slot: Slot, value: fx.Node) -> None:
    """Put `value` into a slot."""
    key = slot.key
    argument = node.args[key] if isinstance(key, int) else node.kwargs[key]
    new = value
    if slot.item is not None:
        # fx keeps lists among arguments immutable.
        new = [value if k == slot.item else item for k, item in enumerate(argument)]
    if isinstance(key, int):
        node.update_arg(key, new)
    else:
        node.update_kwarg(key, new)


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
class CallWeight:
    """The weight of a call. module: the layer that holds it; else `argument` gets the graph's value.

    transposed: the node reads it transposed.
    """

    site: str
    transposed: bool
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

    inputs: ValueInfos = ()
    # A trace has followed one way through all control flow, so there are no bodies.
    scopes: Names = ("",)
    outputs: set[str] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[TensorId, Shape] = field(default_factory=dict)
    integers: set[str] = field(default_factory=set)
    values: dict[str, fx.Node | None] = field(default_factory=dict)
    arguments: dict[tuple[str, int], Argument] = field(default_factory=dict)
    weights: dict[str, CallWeight] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    reasons: list[Unquantized] = field(default_factory=list)
    _by_name: dict[str, CallNode] = field(default_factory=dict)
    _producers: dict[str, CallNode] = field(default_factory=dict)
    _consumers: defaultdict[str, list[Edge]] = field(default_factory=lambda: defaultdict(list))

    def add_node(
        self,
        call: TracedCall,
        name: str,
        op_type: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        **attrs: Any,
    ) -> None:
        """Append a node of a call; its inputs are made before it."""
        node = CallNode(
            name=name,
            op_type=op_type,
            domain="",
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            attrs=attrs,
            scope="",
            order=len(self._by_name),
            path=call.name.path,
            op=call.op,
            call=call.name.name,
            function=call.function,
        )
        self._by_name[name] = node
        self._producers.update(dict.fromkeys(node.outputs, node))
        for k, tensor in enumerate(node.inputs):
            self._consumers[tensor].append(Edge(name, k))

    @property
    def nodes(self) -> tuple[CallNode, ...]:
        """All nodes in the order in which they run."""
        return tuple(self._by_name.values())

    def find_node(self, name: str) -> CallNode:
        """The node of this name."""
        return self._by_name[name]

    def resolve_tensor(self, tensor: str, scope: str) -> MaybeTensor:
        """The tensor of this name; there is one scope."""
        return TensorId(tensor) if tensor else None

    def find_producer(self, t: MaybeTensor) -> CallNode | None:
        """The node that makes the tensor."""
        return None if t is None else self._producers.get(t.name)

    def list_consumers(self, t: MaybeTensor) -> Edges:
        """Every node input that reads the tensor."""
        return () if t is None else tuple(self._consumers[t.name])

    def is_output(self, t: MaybeTensor) -> bool:
        """True when the module returns the tensor."""
        return t is not None and t.name in self.outputs

    def is_constant(self, t: MaybeTensor) -> bool:
        """True for parameters and tensors computed from them alone."""
        return t is not None and t.name in self.constants

    def find_constant(self, t: MaybeTensor) -> Array | None:
        """The value of a constant."""
        value = None if t is None else self.constants.get(t.name)
        # Engines' rules look at values, not at the type and device that training takes.
        return None if value is None else np.asarray(value.detach().float().cpu())

    def find_shape(self, t: MaybeTensor) -> Dims | None:
        """The shape of a constant; of computed tensors an example shows it, which is given beside the graph."""
        value = None if t is None else self.constants.get(t.name)
        return None if value is None else tuple(value.shape)

    def find_dtype(self, t: MaybeTensor) -> int:
        """int64 for integers; float32, which engines compute in, for any other type that may be one."""
        return TensorProto.INT64 if t is not None and t.name in self.integers else TensorProto.FLOAT
