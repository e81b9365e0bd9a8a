"""Modules that cannot be traced as a graph of unconnected layers: each reads `<path>.in` and gives `<path>.out`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onnxq.config import Config, matches_any
from onnxq.sites import Refusal
from torch_frontend.placement.graph import CallGraph, Weight
from torch_frontend.placement.types import find_op_type
from torch_frontend.qmodules import Entry, WeightQuantized, explain_unconvertible, find_layer

# Operators without a weight that people use as modules where a model cannot be traced. The others (activations,
# norms) stay float: what stands before them is not known, and a pair there may round twice.
_BY_HAND = ("add", "mul", "matmul", "cat")


def lower_layers(model: nn.Module, config: Config, prefix: str = "") -> CallGraph:
    """The graph of the known layers of a module. prefix: the module's own qualified name, with which sites begin."""
    graph, done = CallGraph(), set()
    # A module under several names is one layer; the first name that is not skipped counts.
    for path, module in model.named_modules(remove_duplicate=False):
        full = f"{prefix}.{path}" if prefix else path
        entry = find_layer(module) if path else None
        if entry is not None and id(module) not in done and not _is_skipped(config, full):
            done.add(id(module))
            _add_layer(graph, module, entry, path, full, products=config.mode == "weight-only")
    return graph


def name_input(path: str, k: int) -> str:
    """The site of data argument k of a layer."""
    return f"{path}.in{k or ''}"


def _is_skipped(config: Config, path: str) -> bool:
    parts, patterns = path.split("."), config.torch.skip_trace
    return bool(patterns) and any(matches_any(patterns, ".".join(parts[:k])) for k in range(1, len(parts) + 1))


def _add_layer(graph: CallGraph, module: Any, entry: Entry, place: str, path: str, *, products: bool) -> None:
    """Add a layer. place: its path in the module that is converted. path: its whole name, for sites and rules.

    products: a Linear is the MatMul that it becomes for data of three axes, as those of transformers.
    """
    op = entry.op
    inputs = [name_input(path, k) for k in range(len(entry.data))]
    weighted = entry.qmodule is not None and issubclass(entry.qmodule, WeightQuantized)
    why = explain_unconvertible(module) if weighted else None
    graph.values.update(dict.fromkeys(inputs))
    # A MatMul reads its weight as [in, out], and the bias is added behind it.
    product = op.name == "linear" and (products or op.weight_axis == 1)
    turned = product and op.weight_axis == 0
    closed = op.refused is not None or why is not None or (op.weight is None and op.name not in _BY_HAND)
    if op.refused is not None:
        graph.reasons.append(Refusal(path, *op.refused, "no-kernel", "R101"))
    elif why is not None:
        graph.reasons.append(Refusal(path, why, "give it a plain weight", "weight", "R110"))
    elif weighted:
        tensor = f"{path}.{op.weight}"
        graph.weights[path] = Weight(tensor, module=place, transposed=turned)
        graph.constants[tensor] = module.weight.t() if turned else module.weight
        # A Gather reads its table first.
        inputs.insert(0 if op.name == "embedding" else len(inputs), tensor)
        if isinstance(getattr(module, "bias", None), Tensor) and not product:
            graph.constants[f"{path}.bias"] = module.bias
            inputs.append(f"{path}.bias")
    attrs = {} if product else {"transB": 1} if op.name == "linear" else {"group": getattr(module, "groups", 1)}
    graph.add(path, "MatMul" if product else find_op_type(op), inputs, [f"{path}.out"], path=path, op=op, **attrs)
    if closed:
        graph.closed.add(path)
