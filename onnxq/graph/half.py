"""float16 models: computed in float32 where integer kernels need it, stored in float16 where they stay float.

ORT's CPU provider computes float16 by casting to float32 node by node, and fuses no quantized kernel between
such casts. Doing it once for the whole model changes nothing but the rounding between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.light import M, ModelLike, WeightStore, bare_proto, copy_store, rebuild
from onnxq.graph.names import choose_name
from onnxq.graph.scopes import rename_reads, walk_graphs
from onnxq.graph.values import decode_tensor, encode_tensor
from onnxq.sites import TensorId

_COMPUTE = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Below this a Cast costs more in the file than it saves.
_WORTH = 1024


def computes_in_half(proto: ModelLike) -> bool:
    """True when some Conv, Gemm or MatMul reads float16 (types as declared or inferred)."""
    index = GraphIndex(proto)
    for node in index.nodes:
        if node.op_type in _COMPUTE:
            for name in node.inputs:
                tensor = index.resolve(name, node.scope) if name else None
                if tensor is not None and index.dtype(tensor) == TensorProto.FLOAT16:
                    return True
    return False


def widen_half(model: M) -> M:
    """A copy that computes in float32 wherever `model` computes in float16; inputs and outputs keep their types.

    Graph inputs and outputs of type float16 get a Cast named `<tensor>/Cast`.
    """
    out, store = ModelProto(), copy_store(model)
    out.CopyFrom(bare_proto(model))
    taken = {name for _, graph in walk_graphs(out.graph) for node in graph.node for name in (*node.output, node.name)}
    for scope, graph in walk_graphs(out.graph):
        _widen_constants(graph, store if not scope else None)
        for node in graph.node:
            _widen_node(node)
        del graph.value_info[:]
        if scope:
            _widen_types((*graph.input, *graph.output))
    _keep_interface(out.graph, taken)
    return rebuild(model, out, store)


def _widen_constants(graph: GraphProto, store: WeightStore | None) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor, store)
    for sparse in graph.sparse_initializer:
        _widen_tensor(sparse.values)


def _widen_tensor(tensor: TensorProto, store: WeightStore | None = None) -> None:
    if tensor.data_type == TensorProto.FLOAT16:
        wide = encode_tensor(tensor.name, decode_tensor(tensor, store).astype(np.float32), store=store)
        wide.metadata_props.extend(tensor.metadata_props)
        tensor.CopyFrom(wide)


def _widen_node(node: NodeProto) -> None:
    attr: AttributeProto
    for attr in node.attribute:
        if attr.type == AttributeProto.TENSOR:
            _widen_tensor(attr.t)
        elif attr.name in ("to", "dtype", "output_dtype") and attr.i == TensorProto.FLOAT16:
            attr.i = TensorProto.FLOAT


def _widen_types(values: Iterable[ValueInfoProto]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _keep_interface(graph: GraphProto, taken: set[str]) -> None:
    """Casts at the borders, so that callers see the types they know."""
    fixed = {tensor.name for tensor in graph.initializer}
    heads: list[NodeProto] = []
    tails: list[NodeProto] = []
    for value in graph.input:
        if value.name not in fixed and value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            wide = choose_name(f"{value.name}/float32", taken)
            rename_reads(graph, {value.name: wide})
            heads.append(_make_cast(value.name, wide, TensorProto.FLOAT, choose_name(f"{value.name}/Cast", taken)))
    _widen_types(value for value in graph.input if value.name in fixed)
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            wide = choose_name(f"{value.name}/float32", taken)
            rename_reads(graph, {value.name: wide})
            for node in graph.node:
                node.output[:] = [wide if name == value.name else name for name in node.output]
            tails.append(_make_cast(wide, value.name, TensorProto.FLOAT16, choose_name(f"{value.name}/Cast", taken)))
    nodes = [*heads, *graph.node, *tails]
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _make_cast(source: str, target: str, to: int, name: str) -> NodeProto:
    return onnx.helper.make_node("Cast", [source], [target], name=name, to=to)


def restore_half(model: M, original: ModelLike) -> M:
    """Store float32 initializers as float16 behind a Cast where the original did and the values are the same.

    Only the main graph's larger initializers: a quantized model must not grow by the weights that stayed float.
    ORT folds such a Cast when it loads the model.
    """
    held = _map_half_initializers(original)
    if not held:
        return model
    out, store = ModelProto(), copy_store(model)
    out.CopyFrom(bare_proto(model))
    graph = out.graph
    taken = {name for _, inner in walk_graphs(graph) for node in inner.node for name in (*node.output, node.name)}
    taken |= {tensor.name for _, inner in walk_graphs(graph) for tensor in inner.initializer}
    casts: list[NodeProto] = []
    for tensor in graph.initializer:
        source = held.get(tensor.name)
        if source is None or tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims, dtype=np.int64) < _WORTH:
            continue
        wide = decode_tensor(tensor, store)
        narrow = wide.astype(np.float16)
        if not np.array_equal(narrow.astype(np.float32), wide):
            continue
        name = tensor.name
        stored = choose_name(source if source != name else f"{name}/float16", taken)
        tensor.CopyFrom(encode_tensor(stored, narrow, store=store))
        casts.append(_make_cast(stored, name, TensorProto.FLOAT, choose_name(f"{name}/Cast", taken)))
    if casts:
        kept = [NodeProto.FromString(node.SerializeToString()) for node in (*casts, *graph.node)]
        del graph.node[:]
        graph.node.extend(kept)
    return rebuild(model, out, store)


def _map_half_initializers(original: ModelLike) -> dict[str, str]:
    """Map float32 tensors to the float16 initializer each comes from: itself, or the one a Cast reads."""
    half = {tensor.name for tensor in original.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    found = {name: name for name in half}
    index = get_index(original)
    for node in index.nodes:
        if node.op_type == "Constant" and index.dtype(TensorId(node.outputs[0], node.scope)) == TensorProto.FLOAT16:
            half.add(node.outputs[0])
            found[node.outputs[0]] = node.outputs[0]
        if node.op_type == "Cast" and not node.scope and node.inputs[0] in half:
            found[node.outputs[0]] = node.inputs[0]
    return found
