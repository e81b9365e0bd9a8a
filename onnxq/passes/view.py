"""Questions that patterns ask of a graph: constants, sole readers, ranks. Nothing here edits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.arrays import Array
from onnxq.graph import ModelLike, NodeRef, get_index
from onnxq.sites import Edge, TensorId

# ORT's CPU provider has most kernels for these only; a chain of double may run where its single node does not.
SINGLE = (TensorProto.FLOAT, TensorProto.FLOAT16)

# Without shape inference these still say something about the rank of what they write.
_LEAST_RANK = {
    **dict.fromkeys(("Conv", "ConvTranspose", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"), 3),
    **dict.fromkeys(("Gemm", "Flatten"), 2),
}


class View:
    """A GraphIndex with the vocabulary of patterns."""

    def __init__(self, proto: ModelLike) -> None:
        self.index = get_index(proto)

    def tensor(self, node: NodeRef, k: int) -> TensorId | None:
        """Input k of a node, None when it is absent."""
        return self.index.input(node, k)

    def output(self, node: NodeRef, k: int = 0) -> TensorId:
        """Output k of a node."""
        return TensorId(node.outputs[k], node.scope)

    def producer(self, tensor: TensorId | None, *op_types: str) -> NodeRef | None:
        """The node that writes a tensor, when it is a standard operator of one of these types (any, if none given)."""
        node = None if tensor is None else self.index.producer(tensor)
        if node is None or node.domain or (op_types and not is_op(node, *op_types)):
            return None
        return node

    def constant(self, node: NodeRef, k: int) -> Array | None:
        """The value of a constant input, None when it is absent or computed."""
        return self.index.input_value(node, k)

    def is_constant(self, node: NodeRef, k: int) -> bool:
        """True when input k is there and constant; its value is not decoded."""
        tensor = self.tensor(node, k)
        return tensor is not None and self.index.is_constant(tensor)

    def small_constant(self, node: NodeRef, k: int, limit: int = 1) -> NDArray[np.float64] | None:
        """A constant float input of at most `limit` elements, as float64."""
        tensor = self.tensor(node, k)
        if tensor is None or not self.index.is_constant(tensor):
            return None
        shape = self.index.shape(tensor)
        # By the shape first, so that no large weight is decoded for this.
        if shape is not None and int(np.prod([d if isinstance(d, int) else limit + 1 for d in shape])) > limit:
            return None
        value = self.index.constant(tensor)
        if value is None or value.size > limit or not is_float(value):
            return None
        return value.astype(np.float64)

    def scalar(self, node: NodeRef, k: int) -> tuple[float, int] | None:
        """(value, rank) of a constant input of one element that is finite."""
        value = self.small_constant(node, k)
        # Formulas with inf or NaN in them are not those of the patterns.
        if value is None or value.size != 1 or not np.isfinite(value).all():
            return None
        return float(value.reshape(())), value.ndim

    def sole_reader(self, tensor: TensorId, *op_types: str) -> tuple[NodeRef, int] | None:
        """(node, input) that alone reads a tensor, in the tensor's own scope; None for outputs and captured tensors.

        op_types: only a standard operator of one of these types.
        """
        readers = self.index.consumers(tensor)
        # A reader in a body may run many times, or not at all.
        if len(readers) != 1 or self.kept(tensor) or readers[0].scope != tensor.scope:
            return None
        node = self.index.node(readers[0].node)
        return None if op_types and not is_op(node, *op_types) else (node, readers[0].index)

    def kept(self, tensor: TensorId) -> bool:
        """True when somebody outside the node list sees the tensor: a (sub)graph output or a body that captures it."""
        return self.index.is_output(tensor) or self.index.captured(tensor)

    def private(self, tensors: Iterable[TensorId], nodes: set[str]) -> bool:
        """True when only `nodes` read these tensors."""
        return all(not self.kept(t) and all(edge.node in nodes for edge in self.index.consumers(t)) for t in tensors)

    def owned(self, tensor: TensorId) -> bool:
        """True for an initializer that one node input alone reads, so that it may take another value."""
        readers = self.index.consumers(tensor)
        return self.index.producer(tensor) is None and len(readers) == 1 and not self.kept(tensor)

    def least_rank(self, tensor: TensorId) -> int:
        """The rank of a tensor, or its known minimum."""
        shape = self.index.shape(tensor)
        if shape is not None:
            return len(shape)
        node = self.producer(tensor)
        return 0 if node is None else _LEAST_RANK.get(node.op_type, 0)

    def rank(self, tensor: TensorId) -> int | None:
        """The rank of a tensor where it is known."""
        shape = self.index.shape(tensor)
        return None if shape is None else len(shape)

    def edge(self, node: NodeRef, k: int) -> Edge:
        """Input k of a node as an edge."""
        return Edge(node.name, k, node.scope)


def is_op(node: NodeRef, *op_types: str) -> bool:
    """True for a standard operator of one of these types."""
    return node.op_type in op_types and not node.domain


def is_float(value: Array) -> bool:
    """True for float16/32/64 and bfloat16 (whose numpy kind is not 'f')."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


# A unit in the last place of these types; beside them some of float32.
_TOLERANCES = {int(TensorProto.FLOAT16): 1e-3, int(TensorProto.BFLOAT16): 8e-3}


def tolerance(dtype: int) -> float:
    """How far a constant of this ONNX dtype may stand from its mathematical value by rounding (relative)."""
    return _TOLERANCES.get(dtype, 1e-6)
