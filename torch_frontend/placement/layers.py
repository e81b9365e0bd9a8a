"""Modules that cannot be traced as a graph of unconnected layers: each reads `<path>.in` and gives `<path>.out`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from onnxq.config import Config, matches_any
from onnxq.sites import Refusal
from torch_frontend.placement.graph import CallGraph, CallNode, Weight
from torch_frontend.qmodules import Entry, WeightQuantized, explain_unconvertible, find_module_entry

# Operators without a weight that people use as modules where a model cannot be traced. The others (activations,
# norms) stay float: what stands before them is not known, and a pair there may round twice.
_BY_HAND = ("add", "mul", "matmul", "cat")


def lower_layers(model: nn.Module, config: Config, prefix: str = "") -> CallGraph:
    """The graph of the known layers of a module. prefix: the module's own qualified name, with which sites begin."""
    graph, done = CallGraph(), set()
    for path, module in list_children(model):
        full = f"{prefix}.{path}" if prefix else path
        entry = find_module_entry(module)
        if entry is None or id(module) in done or (config.torch.skip_trace and _is_skipped(config, full)):
            continue
        done.add(id(module))
        _add_layer(graph, module, entry, full)
    return graph


def list_children(model: nn.Module, above: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of everything inside, a module once for each of its names."""
    for leaf, child in model._modules.items():
        if child is not None:
            path = f"{above}.{leaf}" if above else leaf
            yield path, child
            yield from list_children(child, path)


def name_input(path: str, k: int) -> str:
    """The site of data argument k of a layer."""
    return f"{path}.in{k or ''}"


def _is_skipped(config: Config, path: str) -> bool:
    parts = path.split(".")
    return any(matches_any(config.torch.skip_trace, ".".join(parts[:k])) for k in range(1, len(parts) + 1))


def _add_layer(graph: CallGraph, module: Any, entry: Entry, path: str) -> None:
    op = entry.op
    inputs = [name_input(path, k) for k in range(len(entry.data))]
    weighted = entry.qmodule is not None and issubclass(entry.qmodule, WeightQuantized)
    why = explain_unconvertible(module) if weighted else None
    graph.values.update(dict.fromkeys(inputs))
    closed = op.refused is not None or why is not None or (op.weight is None and op.name not in _BY_HAND)
    if op.refused is not None:
        graph.reasons.append(Refusal(path, *op.refused, "no-kernel", "R101"))
    elif why is not None:
        graph.reasons.append(Refusal(path, why, "give it a plain weight", "weight", "R110"))
    elif weighted:
        tensor = f"{path}.{op.weight}"
        graph.weights[path] = Weight(tensor, module=path)
        graph.constants[tensor] = module.weight
        inputs.insert(0 if op.name == "embedding" else len(inputs), tensor)
        if isinstance(getattr(module, "bias", None), Tensor):
            graph.constants[f"{path}.bias"] = module.bias
            inputs.append(f"{path}.bias")
    types = {"linear": "Gemm", "bilinear": "Einsum", "embedding": "torch.embedding"}
    op_type = types.get(op.name) or (op.onnx[0] if op.onnx else f"torch.{op.name}")
    attrs = {"transB": 1} if op.name == "linear" else {"group": getattr(module, "groups", 1)}
    graph.add(CallNode(name=path, op_type=op_type, domain="", inputs=tuple(inputs), outputs=(f"{path}.out",),
                       attrs=attrs, scope="", order=graph.count, path=path, op=op))  # fmt: skip
    if closed:
        graph.closed.add(path)
