"""A quantized model whose rounded weights are floats again: the same answers, without rounding back at every run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.graph.base import NodeRef
from onnxq.graph.index import GraphIndex
from onnxq.graph.light import M, bare_proto, copy_store, rebuild
from onnxq.graph.scopes import collect_reads, replace_items
from onnxq.graph.values import encode_tensor
from onnxq.graph.weights import omit_weights, restore_weights

_INTEGERS = frozenset({np.dtype(kind) for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32)})


def dequantize_weights(model: M) -> M:
    """A copy in which every DequantizeLinear of constants in the main graph is the float32 initializer it makes.

    For trials with optimizations off, where ORT would compute them in each run. The values are those that ORT computes;
    blocks, sub-byte types and scales other than float32 stay as they are.
    """
    index, store = GraphIndex(model), copy_store(model)
    found = {}
    for node in index.nodes:
        value = _dequantize_node(index, node)
        if value is not None:
            found[node.name] = encode_tensor(node.outputs[0], value, store=store)
    if not found:
        return model
    light, weights = omit_weights(bare_proto(model))
    graph = light.graph
    replace_items(graph.node, [node for node in graph.node if node.name not in found])
    # Integers, scales and zero points that no other node reads; tied weights may have more readers.
    gone = {name for node in index.nodes if node.name in found for name in node.inputs} - collect_reads(graph)
    replace_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in gone])
    done = restore_weights(light, weights)
    done.graph.initializer.extend(found.values())
    return rebuild(model, done, store)


def _dequantize_node(index: GraphIndex, node: NodeRef) -> NDArray[np.float32] | None:
    if node.op_type != "DequantizeLinear" or node.domain or node.scope or node.attrs.get("block_size", 0):
        return None
    # An output keeps its node: an initializer of its name would make the graph give out a constant.
    tensors = [index.resolve(name, "") for name in node.inputs]
    if not all(t is None or index.is_constant(t) for t in tensors) or index.is_output(node.result):
        return None
    q, scale, zero = (index.input_value(node, k) for k in range(3))
    if q is None or scale is None or scale.dtype != np.float32 or q.dtype not in _INTEGERS:
        return None
    if node.attrs.get("output_dtype", 0) not in (0, TensorProto.FLOAT):
        return None
    shape = [1] * q.ndim
    if scale.size > 1:
        axis = int(node.attrs.get("axis", 1)) % max(q.ndim, 1)
        if scale.ndim != 1 or scale.size != q.shape[axis]:
            return None
        shape[axis] = scale.size
    # In int32, as ORT subtracts: int8 less uint8 does not fit either of them.
    levels = q if zero is None else q.astype(np.int32) - zero.astype(np.int32).reshape(shape if zero.size > 1 else ())
    return np.asarray(levels.astype(np.float32) * scale.reshape(shape if scale.size > 1 else ()))
