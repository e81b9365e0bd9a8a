"""A part of a model as a model: some nodes of the main graph, what they read from outside as inputs, one output."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from onnxq.graph import GraphIndex
from onnxq.graph.scopes import reads
from onnxq.sites import TensorId

Array = NDArray[np.generic]


class Parts:
    """Cuts parts out of one model. `values` gives the arrays that cross a cut, by tensor name."""

    def __init__(self, index: GraphIndex, values: Callable[[Iterable[str]], dict[str, Array]]) -> None:
        self._index, self._values = index, values
        graph = index.proto.graph
        protos = {node.name: node for node in graph.node}
        # The index's order is one that runs, whatever the file's is.
        self._nodes = {ref.name: protos[ref.name] for ref in index.nodes if not ref.scope}
        self._producer = {name: node.name for node in graph.node for name in node.output if name}
        self._fixed = {tensor.name: tensor for tensor in graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}

    def order(self, names: Iterable[str]) -> list[str]:
        """Node names in the order they run in."""
        wanted = set(names)
        return [name for name in self._nodes if name in wanted]

    def maker(self, tensor: str) -> str | None:
        """The node that computes a tensor; None for inputs, initializers and what a Constant node holds."""
        name = self._producer.get(tensor)
        return None if name is None or self._nodes[name].op_type == "Constant" else name

    def before(self, node: str) -> list[str]:
        """The nodes whose outputs a node reads, bodies' captures included."""
        return [name for tensor in reads(self._nodes[node]) if (name := self.maker(tensor)) is not None]

    def makes(self, node: str) -> list[str]:
        """The tensors a node computes."""
        return [name for name in self._nodes[node].output if name]

    def needed(self, names: set[str], output: str) -> set[str]:
        """Those of the nodes that the output is computed from without leaving them."""
        start = self.maker(output)
        found: set[str] = set()
        stack = [start] if start is not None and start in names else []
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            stack.extend(name for name in self.before(node) if name in names)
        return found

    def crossing(self, names: set[str]) -> list[str]:
        """What the nodes read and somebody else computes, or a caller feeds."""
        return [tensor for tensor in self._read(names) if not self._stored(tensor)]

    def _read(self, names: set[str]) -> list[str]:
        nodes = [self._nodes[name] for name in self.order(names)]
        made = {tensor for node in nodes for tensor in node.output}
        return list(dict.fromkeys(tensor for node in nodes for tensor in reads(node) if tensor not in made))

    def _stored(self, tensor: str) -> bool:
        constant = tensor in self._producer and self.maker(tensor) is None
        return tensor in self._fixed or tensor in self._sparse or constant

    def cut(self, names: set[str], output: str) -> tuple[ModelProto, dict[str, Array]]:
        """The nodes as a model with one output, and what to feed it."""
        nodes = [self._nodes[name] for name in self.order(names)]
        model = ModelProto()
        proto = self._index.proto
        model.ir_version = proto.ir_version
        model.opset_import.extend(proto.opset_import)
        model.functions.extend(proto.functions)
        model.graph.name = "part"
        crossing = self.crossing(names)
        for tensor in filter(self._stored, self._read(names)):
            if tensor in self._fixed:
                model.graph.initializer.append(self._fixed[tensor])
            elif tensor in self._sparse:
                model.graph.sparse_initializer.append(self._sparse[tensor])
            else:
                model.graph.node.append(self._nodes[self._producer[tensor]])
        model.graph.node.extend(nodes)
        arrays = self._values([*crossing, output])
        model.graph.input.extend(self._info(name, arrays[name]) for name in crossing)
        model.graph.output.append(self._info(output, arrays[output]))
        self._type(model, nodes, set(crossing) | {output})
        return model, {name: arrays[name] for name in crossing}

    def _info(self, name: str, array: Array) -> onnx.ValueInfoProto:
        """Declared as in the model where it says so: fusions look at shapes."""
        shape = self._index.shape(TensorId(name))
        if shape is None or len(shape) != array.ndim:
            shape = array.shape
        dtype = self._index.dtype(TensorId(name)) or helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, dtype, list(shape))

    def _type(self, model: ModelProto, nodes: list[NodeProto], done: set[str]) -> None:
        inner = {tensor for node in nodes for tensor in node.output} - done
        model.graph.value_info.extend(info for info in self._index.proto.graph.value_info if info.name in inner)
