"""Model-local functions made part of the graphs that call them."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy

import onnx.inliner
import onnx.shape_inference
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.graph.index import find_opset
from onnxq.graph.light import keep_weights
from onnxq.graph.names import assign_names, has_unique_names
from onnxq.graph.scopes import replace_items, walk_all_graphs
from onnxq.graph.weights import omit_weights, restore_weights


@keep_weights
def inline_functions(proto: ModelProto) -> ModelProto:
    """A copy without model-local functions: every call, in every scope, replaced by the function's nodes.

    Names stay unique (onnx numbers the copies). A function written for another opset than the model's is converted.
    Raises ModelError when a function cannot be inlined.
    """
    if not proto.functions:
        return deepcopy(proto)
    # Functions keep their weights: inlining makes new tensors of them, which nothing could be put back into.
    light, omitted = omit_weights(proto, functions=False)
    _write_defaults(light)
    own = find_opset(proto)
    foreign = any(find_opset(function) not in (0, own) for function in proto.functions)
    declared = {value.name for value in light.graph.value_info}
    if foreign:
        _write_types(light)
    try:
        inlined = onnx.inliner.inline_local_functions(light, convert_version=foreign)
    except Exception as error:
        cause = f"cannot be inlined: {error}"
        raise ModelError("model-local functions", cause, "export without functions", code="Q108") from error
    if inlined.functions:
        names = ", ".join(sorted(function.name for function in inlined.functions))
        raise ModelError(names, "this model-local function cannot be inlined", "export without functions", code="Q108")
    _drop_repeats(inlined)
    if foreign:
        # Types that the conversion needed; of tensors of other versions' operators they may be wrong afterwards.
        replace_items(inlined.graph.value_info, [v for v in inlined.graph.value_info if v.name in declared])
    # Nodes of a function need no names.
    if not has_unique_names(inlined):
        assign_names(inlined)
    return restore_weights(inlined, omitted)


def _drop_repeats(proto: ModelProto) -> None:
    """Take out, in place, Constant nodes that define a tensor again: onnx's inliner doubles them where it converts."""
    for _, graph in walk_all_graphs(proto):
        made: set[str] = set()
        for node in list(graph.node):
            if node.op_type == "Constant" and made.issuperset(node.output):
                graph.node.remove(node)
            made.update(node.output)


def _write_types(proto: ModelProto) -> None:
    """Declare, in place, the types of the main graph's tensors, which the inliner asks for where it converts."""
    graph = proto.graph
    known = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    stored = [tensor for tensor in graph.initializer if tensor.name not in known]
    graph.value_info.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored)
    with suppress(Exception):  # the inliner itself says then which type it lacks
        graph.CopyFrom(onnx.shape_inference.infer_shapes(proto).graph)


def _write_defaults(proto: ModelProto) -> None:
    """Give every call, in place, the attributes it leaves at the function's defaults, which onnx's inliner drops."""
    defaults = {(f.domain, f.name, f.overload): f.attribute_proto for f in proto.functions if f.attribute_proto}
    for _, graph in walk_all_graphs(proto) if defaults else ():
        for node in graph.node:
            given = {attr.name for attr in node.attribute}
            known = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(attr for attr in known if attr.name not in given)
