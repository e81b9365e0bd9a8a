"""Conversion of modules that cannot be traced, layer by layer: layers change class, hooks quantize their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_frontend.placement.graph import CallGraph
from torch_frontend.placement.layers import name_input
from torch_frontend.placement.pairs import Pairs, plan_pairs
from torch_frontend.placement.products import PRODUCT_FUNCTIONS
from torch_frontend.placement.rules import CallRequests
from torch_frontend.qmodules import Entry, WeightQuantized, copy_module_tree, find_entry, find_layer
from torch_frontend.quant_model.attach import bind_sums, make_quantizers, swap_layers
from torch_frontend.quantizers import Quantizer

INPUTS = "input_quantizers"
# Operators that CallsOutside reports: they combine tensors or multiply by weights.
_COMBINING = ("add", "sub", "mul", "matmul", "attention", "cat", "conv", "linear", "conv_transpose")


def quantize_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: quantize the module's data arguments by its `input_quantizers`."""
    held = module._modules[INPUTS]
    given, named = list(args), dict(kwargs)
    for name, quantizer in held.named_children():  # type: ignore[union-attr]
        # <parameter>_<position>, by `_hold_inputs`; parameters may hold underscores, so the last one counts.
        param, _, position = name.rpartition("_")
        k = int(position)
        if k < len(given):
            given[k] = _quantize_value(quantizer, given[k])
        elif param in named:
            named[param] = _quantize_value(quantizer, named[param])
    return tuple(given), named


def _quantize_value(quantizer: nn.Module, value: Any) -> Any:
    # Lists are the tensors of a cat or stack.
    if isinstance(value, (list, tuple)):
        return [_quantize_value(quantizer, item) for item in value]
    return quantizer(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def convert_layers(
    model: nn.Module, requests: CallRequests, graph: CallGraph, prefix: str = ""
) -> tuple[nn.Module, dict[str, str], Pairs]:
    """A copy of the module tree that shares its tensors, with quantizers where the planner places them.

    graph: its layers. prefix: the module's own qualified name, with which sites begin. Activation sites are inputs of
    layers (`<path>.in`), since their producers are unknown; a layer that is called twice has one.
    Returns (module, site -> path of its quantizer in the module, activations first, the placement).
    """
    placed, made = plan_pairs(graph, requests, sized=False), copy_module_tree(model)
    inputs = make_quantizers((pair for pair in placed.pairs if pair.weight is None), requests.config)
    # By the classes of before: quantized classes are not registered.
    entries = {path: find_layer(module) for path, module in made.named_modules(remove_duplicate=False)}
    weights = swap_layers(made, placed.pairs, requests.config)
    paths: dict[str, str] = {}
    for path, entry in entries.items():
        if path and entry is not None:
            full = f"{prefix}.{path}" if prefix else path
            paths |= _hold_inputs(made.get_submodule(path), entry, full, path, inputs)
    bind_sums(made, placed.pairs, inputs, weights)
    return made, paths | weights, placed


def _hold_inputs(
    module: nn.Module, entry: Entry, full: str, path: str, inputs: Mapping[str, Quantizer]
) -> dict[str, str]:
    """Give a layer the quantizers of its data arguments. Returns site -> module path."""
    held, paths = nn.Module(), {}
    for k, param in enumerate(entry.data):
        site = name_input(full, k)
        if site in inputs:
            name = f"{param}_{entry.params.index(param)}"
            held.add_module(name, inputs[site])
            paths[site] = f"{path}.{INPUTS}.{name}"
    if paths:
        module.add_module(INPUTS, held)
        module.register_forward_pre_hook(quantize_inputs, with_kwargs=True)
    return paths


class CallsOutside(TorchFunctionMode):
    """Records the functions that combine or multiply tensors outside of layers, by module, while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], None] = {}
        self._stack: list[tuple[str, bool]] = []
        self._handles = []
        for path, module in model.named_modules():
            # Calls inside a known module belong to its operator.
            inside = find_layer(module) is not None or isinstance(module, (WeightQuantized, Quantizer))
            self._handles.append(module.register_forward_pre_hook(partial(self._enter, path, inside)))
            # always_call: the stack must be right after an exception that the user's forward catches.
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, path: str, inside: bool, *_: Any) -> None:
        self._stack.append((path, inside))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, then make it."""
        name = getattr(func, "__name__", "")
        known = find_entry(func) or find_entry(name)
        outside = self._stack and not any(inside for _, inside in self._stack)
        op = name if known is None else known.op.name
        if outside and op in (_COMBINING if known is not None else PRODUCT_FUNCTIONS):
            self.seen[self._stack[-1][0], op] = None
        return func(*args, **(kwargs or {}))

    def stop_recording(self) -> list[tuple[str, str]]:
        """Remove the hooks; return (module, operator) of every recorded call."""
        for handle in self._handles:
            handle.remove()
        return list(self.seen)
