"""Sparse weights stored densely: onnx's version converter and ONNX Runtime's pieces of models take no sparse ones."""

from __future__ import annotations

from copy import deepcopy

from onnx import ModelProto, NodeProto, helper

from onnxq.graph.light import keep_weights
from onnxq.graph.scopes import walk_graphs
from onnxq.graph.values import decode_sparse, encode_tensor

_SPARSE = "sparse_value"


@keep_weights
def store_densely(proto: ModelProto) -> ModelProto:
    """The model itself without sparse weights, else a copy in which they are dense: initializers and Constant nodes.

    Functions must be inlined. Raises ModelError for a sparse tensor that is damaged or too large to be dense.
    """
    if not any(graph.sparse_initializer or any(map(_is_sparse, graph.node)) for _, graph in walk_graphs(proto.graph)):
        return proto
    out = deepcopy(proto)
    for _, graph in walk_graphs(out.graph):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(encode_tensor(sparse.values.name, decode_sparse(sparse), sparse.values.data_type))
        del graph.sparse_initializer[:]
        for node in filter(_is_sparse, graph.node):
            sparse_value = node.attribute[0].sparse_tensor
            dense = encode_tensor(node.output[0], decode_sparse(sparse_value), sparse_value.values.data_type)
            node.attribute[0].CopyFrom(helper.make_attribute("value", dense))
    return out


def _is_sparse(node: NodeProto) -> bool:
    return node.op_type == "Constant" and not node.domain and [one.name for one in node.attribute] == [_SPARSE]
