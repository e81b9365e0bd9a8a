"""Model-local functions made part of the graphs that call them."""

from __future__ import annotations

import onnx.inliner
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.graph.index import opset_of
from onnxq.graph.names import assign_names, has_unique_names
from onnxq.graph.weights import lighten, restore


def inline_functions(proto: ModelProto) -> ModelProto:
    """A copy without model-local functions: every call, in every scope, replaced by the function's nodes.

    Names stay unique (onnx numbers the copies). A function written for another opset than the model's is converted.
    Raises ModelError when a function cannot be inlined.
    """
    if not proto.functions:
        copy = ModelProto()
        copy.CopyFrom(proto)
        return copy
    light, payload = lighten(proto, functions=False)
    own = opset_of(proto)
    foreign = any(
        entry.version != own
        for function in proto.functions
        for entry in function.opset_import
        if entry.domain in ("", "ai.onnx")
    )
    try:
        inlined = onnx.inliner.inline_local_functions(light, convert_version=foreign)
    except Exception as error:
        raise ModelError(
            "model-local functions", f"cannot be inlined: {error}", "export without functions", code="Q108"
        ) from error
    if inlined.functions:
        names = ", ".join(sorted(function.name for function in inlined.functions))
        raise ModelError(names, "this model-local function cannot be inlined", "export without functions", code="Q108")
    if not has_unique_names(inlined):
        assign_names(inlined)
    return restore(inlined, payload)
