"""Types and shapes of every tensor that onnx can infer, in all scopes, whatever the model's size."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import onnx
from onnx import GraphProto, ModelProto, TensorProto

from onnxq.graph.light import keep_weights
from onnxq.graph.precision.contrib import write_stand_ins
from onnxq.graph.scopes import iterate_subgraphs, list_captures, list_defined, replace_items, walk_graphs
from onnxq.graph.weights import omit_weights


@keep_weights
def infer_shapes(proto: ModelProto) -> ModelProto:
    """A copy with value_info from onnx.shape_inference with data propagation.

    The main graph's inputs and outputs stay as declared. Never fails: types that cannot be inferred stay unknown.
    """
    result = deepcopy(proto)
    # Shape inference serializes the model; weights would make that slow, and fail over 2 GB.
    light, _ = omit_weights(proto)
    write_stand_ins(light)
    _repeat_constants(light.graph, {})
    try:
        inferred = onnx.shape_inference.infer_shapes(light, check_type=False, strict_mode=False, data_prop=True)
    except Exception:  # an operator's own inference function may raise anything; the model may run all the same
        return result
    for (scope, target), (_, source) in zip(walk_graphs(result.graph), walk_graphs(inferred.graph), strict=True):
        replace_items(target.value_info, source.value_info)
        if scope:
            _learn_outputs(target, source)
    return result


def _repeat_constants(graph: GraphProto, outer: Mapping[str, TensorProto]) -> None:
    """Give the bodies in a graph copies of the integers around them that they read, such as axes.

    Inference does not look further than the graph of a node for values. outer: initializers of the graphs around.
    """
    known = {**outer, **{tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT64}}
    for node in graph.node:
        for _, body in iterate_subgraphs(node):
            own = list_defined(body)
            _repeat_constants(body, {name: tensor for name, tensor in known.items() if name not in own})
            body.initializer.extend(known[name] for name in list_captures(body) if name in known)


def _learn_outputs(target: GraphProto, source: GraphProto) -> None:
    for old, new in zip(target.output, source.output, strict=True):
        if new.type.WhichOneof("value"):
            old.type.CopyFrom(new.type)
