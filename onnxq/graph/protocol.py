"""The questions that placement asks of a graph: the ONNX index answers them, and so may a graph of another kind."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from onnxq.graph.index import NodeRef, ValueInfo
from onnxq.sites import Edge, TensorId


class Graph(Protocol):
    """Nodes in ONNX's operators and layouts, in the order in which they run; see GraphIndex for each method."""

    @property
    def nodes(self) -> tuple[NodeRef, ...]:
        """All nodes, in the order in which they run."""

    @property
    def inputs(self) -> tuple[ValueInfo, ...]:
        """The callers' own value."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """The main graph, "", and the bodies inside it."""

    def node(self, name: str) -> NodeRef:
        """The node of this name."""

    def resolve(self, tensor: str, scope: str) -> TensorId | None:
        """The tensor that this name means when read from `scope`."""

    def producer(self, t: TensorId) -> NodeRef | None:
        """The node that makes the tensor."""

    def consumers(self, t: TensorId) -> tuple[Edge, ...]:
        """Every node input that reads the tensor, in the order in which the nodes run."""

    def is_output(self, t: TensorId) -> bool:
        """True when the tensor is an output of its graph."""

    def is_constant(self, t: TensorId) -> bool:
        """True when the tensor has a value before the graph runs."""

    def constant(self, t: TensorId) -> NDArray[Any] | None:
        """The value of a constant tensor."""

    def shape(self, t: TensorId) -> tuple[int | str | None, ...] | None:
        """The declared shape; None when even the rank is unknown."""

    def dtype(self, t: TensorId) -> int:
        """The onnx.TensorProto dtype, 0 when unknown."""
