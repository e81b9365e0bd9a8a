"""Routers of fused mixtures of experts, written out: the experts that such an operator picks become a tensor.

The operator picks the best experts of each row by itself, so that nobody sees which. In front of it the same choice is
written as a TopK, and the scores it reads put those first that the TopK names, whoever names them: those of another
model, too. Of the other experts, scores that are not lower than theirs go just below; all else stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper, parser

from onnxq.graph import ModelLike, infer_shapes, name_nodes
from onnxq.graph.index import GraphIndex, find_opset
from onnxq.graph.light import bare_proto, rebuild
from onnxq.graph.scopes import replace_items, walk_graphs
from onnxq.graph.weights import omit_weights, restore_weights

_ROUTED = frozenset({"MoE", "QMoE"})
_DOMAIN = "com.microsoft"
# The input that holds a score of each expert.
_SCORES = 1
# The opset that has these operators in this form.
_OPSET = 11
_CHOICE = parser.parse_graph(
    """router (float[N, E] scores) => (float[N, E] forced) {
        values, experts = TopK <axis = -1> (scores, k)
        best = GatherElements <axis = -1> (scores, experts)
        least, place = TopK <axis = -1, largest = 0> (best, one)
        below = Sub(least, step)
        low = Min(scores, below)
        forced = ScatterElements <axis = -1> (low, experts, best)
    }"""
)
# What scores of this type tell apart; those of narrower types differ by more.
_STEPS: Mapping[int, float] = {TensorProto.FLOAT: 1e-4}
_COARSE_STEP = 1 / 16


def write_out_routers(model: ModelLike) -> ModelLike:
    """A copy of the model, nodes named, with the experts of each fused mixture as a tensor.

    The very object where it has none, or is older than the operators that this takes.
    """
    graphs = walk_graphs(bare_proto(model).graph)
    if find_opset(model) < _OPSET or not any(_is_routed(node) for _, graph in graphs for node in graph.node):
        return model
    named = name_nodes(model)
    index = GraphIndex(infer_shapes(named))
    proto, weights = omit_weights(bare_proto(named))
    for scope, graph in walk_graphs(proto.graph):
        nodes: list[NodeProto] = []
        for node in graph.node:
            if _is_routed(node):
                scores = index.resolve(node.input[_SCORES], scope)
                nodes += _write_out(graph, node, (index.dtype(scores) if scores else 0) or TensorProto.FLOAT)
            nodes.append(node)
        replace_items(graph.node, nodes)
    return rebuild(model, restore_weights(proto, weights))


def _is_routed(node: NodeProto) -> bool:
    # The sparse mixer draws its second expert by other scores than it shows.
    sparse = any(attr.name == "use_sparse_mixer" and attr.i for attr in node.attribute)
    return node.domain == _DOMAIN and node.op_type in _ROUTED and not sparse


def _write_out(graph: GraphProto, node: NodeProto, dtype: int) -> list[NodeProto]:
    """The nodes in front of a mixture, which then reads their result. dtype: the ONNX type of its scores."""
    base = f"{node.name}/router"
    count = next((attr.i for attr in node.attribute if attr.name == "k"), 1)
    step = np.asarray(_STEPS.get(dtype, _COARSE_STEP), helper.tensor_dtype_to_np_dtype(dtype))
    constants = {"k": np.array([count], np.int64), "one": np.array([1], np.int64), "step": step}
    graph.initializer.extend(numpy_helper.from_array(value, f"{base}/{key}") for key, value in constants.items())
    nodes = []
    for part in _CHOICE.node:
        copy = NodeProto()
        copy.CopyFrom(part)
        copy.input[:] = [node.input[_SCORES] if name == "scores" else f"{base}/{name}" for name in part.input]
        copy.output[:] = [f"{base}/{name}" for name in part.output]
        copy.name = base if part.output[0] == "values" else f"{base}/{part.output[0]}"
        nodes.append(copy)
    node.input[_SCORES] = f"{base}/forced"
    return nodes
