"""torch.onnx.export of a module whose quantizers leave markers, and clean-up of its result."""

import ast
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from onnx import ModelProto, NodeProto
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from onnxq.errors import ModelError, PlanError
from onnxq.graph.scopes import list_declared, map_entries, replace_items, walk_graphs
from torch_frontend.quantizers import Dynamic, Quantizer, quantizers_of
from torch_frontend.tracing.capture import silence_torch
from torch_frontend.tracing.modules import Args, Inputs, Kwargs
from torch_frontend.tracing.values import use_eval_mode

# Keys of node metadata that torch's exporter writes: the scopes of a node as a Python list, and the scope by which
# viewers group nodes.
_SCOPES = "pkg.torch.onnx.name_scopes"
_KEPT = ("namespace",)


def export_with_markers(
    model: nn.Module, inputs: Inputs, *, opset: int | None, **options: Any
) -> ModelProto:
    """The model as torch exports it, markers included. options: of torch.onnx.export.

    Raises ModelError if torch cannot export it.
    """
    # Its progress, its notes on torchvision, and warnings about its own code.
    with silence_torch(
        "torch.onnx._internal.exporter", logging.ERROR, DeprecationWarning, FutureWarning
    ):
        # Of one batch for several inputs, and of weights that a layer of torch.nn computes.
        warnings.filterwarnings("ignore", "# The axis name|The tensor attribute", UserWarning)
        try:
            program = torch.onnx.export(
                model,
                inputs.args,
                kwargs=inputs.kwargs or None,
                dynamo=True,
                opset_version=opset,
                verbose=False,
                external_data=False,
                **options,
            )
        except Exception as error:  # torch may raise anything in the user's forward
            cause = f"torch.onnx.export failed: {_explain_error(error)}"
            fix = "see the error above; torch.export has to trace the model's forward"
            raise ModelError(type(model).__name__, cause, fix, code="Q122") from error
    if program is None:  # pragma: no cover - only with a file given
        raise ModelError(
            type(model).__name__, "torch.onnx.export gave nothing", "update torch", code="Q122"
        )
    return clean_up_model(program.model_proto)


def order_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with those by name in the order of the forward, and the defaults of those between them.

    torch.export gives a GraphModule's inputs by position, whatever their names (torch 2.13).
    """
    args, kwargs = inputs
    if args and isinstance(args[-1], dict) and not kwargs:
        # torch.onnx.export would take its entries for inputs of the model.
        return Inputs(
            (), dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
        )
    if not isinstance(model, fx.GraphModule) or not kwargs:
        return inputs
    known = dict(list(inspect.signature(model.forward).parameters.items())[len(args) :])
    last = max((k for k, name in enumerate(known) if name in kwargs), default=-1)
    ordered = {name: kwargs.get(name, known[name].default) for name in list(known)[: last + 1]}
    return Inputs(args, {**ordered, **kwargs})


def batch_dims(inputs: Inputs) -> Any:
    """Dynamic shapes for torch.export, in which the first axis of every tensor is the same batch size."""
    batch = torch.export.Dim("batch")

    def dims(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.dim() else None

    return pytree.tree_map(dims, inputs.kwargs or inputs.args)


def clean_up_model(proto: ModelProto) -> ModelProto:
    """Name nodes `<module path>/<operator>`; of torch's metadata keep the scopes that viewers group by; in place."""
    # The metadata hold stack traces with paths of this machine.
    del proto.graph.metadata_props[:]
    counts: Counter[str] = Counter()
    for _, graph in walk_graphs(proto.graph):
        for value in (*list_declared(graph), *graph.initializer):
            del value.metadata_props[:]
            value.doc_string = ""
        for node in graph.node:
            base = _name_node(node)
            node.name = f"{base}_{counts[base]}" if counts[base] else base
            counts[base] += 1
            scopes = [entry for entry in node.metadata_props if entry.key in _KEPT]
            replace_items(node.metadata_props, scopes)
            node.doc_string = ""
    return proto


def _name_node(node: NodeProto) -> str:
    """`<module path>/<operator>` of a node; without the path for calls of the model's own forward."""
    scopes = map_entries(node.metadata_props).get(_SCOPES, "[]")
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


def active_quantizers(model: nn.Module) -> list[Quantizer]:
    """The quantizers that are on and leave a marker.

    Raises CalibrationError naming one without qparams, PlanError if none is on, ModelError if two have one site.
    """
    quantizers = [
        quantizer for quantizer in quantizers_of(model) if quantizer.active and quantizer.marks
    ]
    if not quantizers:
        raise PlanError(
            type(model).__name__,
            "none of its quantizers is switched on",
            "call freeze(), or set_quant() on a QuantModel",
            code="Q409",
        )
    sites = set()
    # Markers are found by site alone.
    for quantizer in quantizers:
        if not isinstance(quantizer, Dynamic):
            quantizer.qparams()
        if quantizer.site in sites:
            raise ModelError(
                quantizer.site,
                "two quantizers have this site",
                "give every quantizer a site of its own",
                code="Q120",
            )
        sites.add(quantizer.site)
    return quantizers


@contextmanager
def prepare_markers(
    model: nn.Module, quantizers: Sequence[Quantizer], args: Args, kwargs: Kwargs
) -> Iterator[None]:
    """Run a block, an export, in eval mode with fixed qparams and baked weights.

    Weights that their quantizer does more with than round to nearest (DoReFa, AdaRound) are caught in one run of the
    model.
    """
    with use_eval_mode(model):
        baked = _bake_weights(model, quantizers, Inputs(args, kwargs))
        try:
            for quantizer in quantizers:
                quantizer.prepare_marker(baked.get(quantizer.site))
            yield
        finally:
            for quantizer in quantizers:
                quantizer.forget_marker()


def _bake_weights(
    model: nn.Module, quantizers: Sequence[Quantizer], inputs: Inputs
) -> dict[str, Tensor]:
    """Site -> baked weight, of quantizers that bake."""
    weights: dict[str, Tensor] = {}

    def catch(quantizer: nn.Module, inputs: Args) -> None:
        weight = quantizer.bake(inputs[0]).detach().clone()
        # The marker of a site holds one weight.
        if not torch.equal(weights.setdefault(quantizer.site, weight), weight):
            cause = "quantizes two weights, which it changes differently"
            raise ModelError(quantizer.site, cause, "give each a quantizer of its own", code="Q120")

    # A weight may be computed in forward, so only a run shows it.
    changing = [q for q in quantizers if q.role.is_weight and type(q).bake is not Quantizer.bake]
    with ExitStack() as hooks:
        for quantizer in changing:
            hooks.enter_context(quantizer.register_forward_pre_hook(catch))
        if changing:
            inputs.run_model(model)
    return weights
