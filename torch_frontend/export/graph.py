"""torch.onnx.export with markers, and clean-up of its result: names by module path, no paths of source files."""

from __future__ import annotations

import ast
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, fx, nn

from onnxq.errors import ModelError
from onnxq.graph.scopes import walk_graphs
from torch_frontend.tracing.capture import silence_torch

# Keys of node metadata that torch's exporter writes: the scopes of a node as a Python list, and the scope by which
# viewers group nodes.
_SCOPES = "pkg.torch.onnx.name_scopes"
_KEPT = ("namespace",)


def export_with_markers(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    opset: int | None,
    optimize: bool,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> onnx.ModelProto:
    """The model as torch exports it, markers included. Raises ModelError if torch cannot export it."""
    # Its progress, its notes on torchvision, and warnings about its own code.
    with silence_torch("torch.onnx._internal.exporter", logging.ERROR, DeprecationWarning, FutureWarning):
        try:
            program = torch.onnx.export(
                model, args, kwargs=kwargs or None, dynamo=True, optimize=optimize, opset_version=opset,
                dynamic_shapes=dynamic_shapes, input_names=input_names, output_names=output_names, verbose=False,
                external_data=False,
            )  # fmt: skip
        except Exception as error:  # torch may raise anything in the user's forward
            raise ModelError(
                type(model).__name__,
                f"torch.onnx.export failed: {_explain_error(error)}",
                "see the error above; torch.export has to trace the model's forward",
                code="Q122",
            ) from error
    if program is None:  # pragma: no cover - only with a file given
        raise ModelError(type(model).__name__, "torch.onnx.export gave nothing", "update torch", code="Q122")
    proto: onnx.ModelProto = program.model_proto
    return clean_up_model(proto)


def order_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with those by name in the order of the forward, and the defaults of those between them.

    torch.export gives a GraphModule's inputs by position, whatever their names (torch 2.13).
    """
    if not isinstance(model, fx.GraphModule) or not kwargs:
        return args, kwargs
    known = dict(list(inspect.signature(model.forward).parameters.items())[len(args) :])
    last = max((k for k, name in enumerate(known) if name in kwargs), default=-1)
    ordered = {name: kwargs.get(name, known[name].default) for name in list(known)[: last + 1]}
    return args, {**ordered, **kwargs}


def batch_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Dynamic shapes for torch.export, in which the first axis of every tensor is the same batch size."""
    batch = torch.export.Dim("batch")

    def dims(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.dim() else None

    if args and kwargs:
        raise ModelError("dynamic_batch", "inputs are given by position and by name", "pass dynamic_shapes instead")
    return {name: dims(value) for name, value in kwargs.items()} if kwargs else tuple(dims(value) for value in args)


def clean_up_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Name nodes `<module path>/<operator>`; of torch's metadata keep the scopes that viewers group by; in place."""
    # The metadata hold stack traces with paths of this machine.
    del proto.graph.metadata_props[:]
    counts: Counter[str] = Counter()
    for _, graph in walk_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del value.metadata_props[:]
            value.doc_string = ""
        for node in graph.node:
            base = _name_node(node)
            node.name = f"{base}_{counts[base]}" if counts[base] else base
            counts[base] += 1
            kept = [entry for entry in node.metadata_props if entry.key in _KEPT]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
            node.doc_string = ""
    return proto


def _name_node(node: onnx.NodeProto) -> str:
    """`<module path>/<operator>` of a node; without the path for calls of the model's own forward."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    try:
        path = [str(name) for name in ast.literal_eval(scopes)]
    except (SyntaxError, ValueError):
        path = []
    # The last scope is the node itself. torch writes _empty_nn_module_stack… for nodes that no module made.
    module = path[-2] if len(path) > 1 and not path[-2].startswith("_empty_nn_module_stack") else ""
    return f"{module}/{node.op_type}" if module else node.op_type


def _explain_error(error: BaseException) -> str:
    """Class and first line of the innermost cause: torch wraps the user's error several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
