"""Conversion of modules that cannot be traced, layer by layer: layers change class, hooks quantize their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onnxq.config import Config
from onnxq.sites import Unquantized
from torch_frontend.placement import CallGraph, CallRequests, Pair, bind_sums, list_children, name_input, plan_pairs
from torch_frontend.qmodules import (
    Entry,
    WeightQuantized,
    copy_shallowly,
    find_function_entry,
    find_method_entry,
    find_module_entry,
    swap_class,
)
from torch_frontend.quant_model.attach import WEIGHT, make_quantizer
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing import replace_module

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


@dataclass
class Converted:
    """A module converted without tracing. paths: site -> module path of its quantizer, relative to the module."""

    module: nn.Module
    activations: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    reasons: list[Unquantized] = field(default_factory=list)


def convert_layers(model: nn.Module, requests: CallRequests, graph: CallGraph, prefix: str = "") -> Converted:
    """A copy of the module tree that shares its tensors, with quantizers where the planner places them.

    graph: its layers. prefix: the module's own qualified name, with which sites begin. Its activation sites are inputs
    of layers (`<path>.in`), since their producers are unknown; a layer that is called twice has one.
    """
    config, placed = requests.config, plan_pairs(graph, requests, sized=False)
    out = Converted(copy_module_tree(model), reasons=placed.reasons)
    weights = {pair.weight.module: pair for pair in placed.pairs if pair.weight is not None}
    inputs: dict[str, Quantizer] = {}
    for pair in sorted(placed.pairs, key=lambda pair: pair.leader != pair.site):
        if pair.weight is None:
            inputs[pair.site] = make_quantizer(pair, config, inputs)
    done: dict[int, nn.Module] = {}
    shared: dict[tuple[int, Any], Quantizer] = {}
    for path, module in list(list_children(out.module)):
        full = f"{prefix}.{path}" if prefix else path
        entry = find_module_entry(module)
        if entry is None:
            continue
        # One module under two names stays one module.
        if id(module) not in done:
            made = module if full not in weights else _hold_weight(module, path, weights[full], config, out, shared)
            _hold_inputs(made, entry, full, path, inputs, out)
            done[id(module)] = made
        replace_module(out.module, path, done[id(module)])
    skip = len(prefix) + 1 if prefix else 0
    bind_sums(placed.pairs, inputs, lambda p: out.module.get_submodule(f"{p.weight.module[skip:]}.{WEIGHT}"))  # type: ignore[union-attr]
    return out


def copy_module_tree(model: nn.Module, memo: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of the module tree with the same tensors. memo: id of a module -> its copy."""
    memo = {} if memo is None else memo
    if id(model) not in memo:
        memo[id(model)] = made = copy_shallowly(model)
        for name, child in made._modules.items():
            made._modules[name] = None if child is None else copy_module_tree(child, memo)
    return memo[id(model)]


def _hold_weight(
    module: nn.Module, path: str, pair: Pair, config: Config, out: Converted, shared: dict[tuple[int, Any], Quantizer]
) -> nn.Module:
    """The layer in its quantized class; tied weights of one spec share a quantizer."""
    made = swap_class(module)
    key = (id(made._parameters["weight"]), (pair.spec, pair.quantizer))
    if key not in shared:
        shared[key] = make_quantizer(pair, config, {})
        out.weights[pair.site] = f"{path}.{WEIGHT}"
    made.add_module(WEIGHT, shared[key])
    return made


def _hold_inputs(
    module: nn.Module, entry: Entry, full: str, path: str, inputs: Mapping[str, Quantizer], out: Converted
) -> None:
    held = nn.Module()
    for k, param in enumerate(entry.data):
        site = name_input(full, k)
        if site in inputs:
            name = f"{param}_{entry.params.index(param)}"
            held.add_module(name, inputs[site])
            out.activations[site] = f"{path}.{INPUTS}.{name}"
    if held._modules:
        module.add_module(INPUTS, held)
        module.register_forward_pre_hook(quantize_inputs, with_kwargs=True)


class CallsOutside(TorchFunctionMode):
    """Records the functions that combine or multiply tensors outside of layers, by module, while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], None] = {}
        self._stack: list[tuple[str, bool]] = []
        self._handles = []
        for path, module in model.named_modules():
            # Calls inside a known module belong to its operator.
            inside = find_module_entry(module) is not None or isinstance(module, (WeightQuantized, Quantizer))
            self._handles.append(module.register_forward_pre_hook(_Push(self._stack, path, inside)))
            # always_call: the stack must be right after an exception that the user's forward catches.
            self._handles.append(module.register_forward_hook(_Pop(self._stack), always_call=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, then make it."""
        known = find_function_entry(func) or find_method_entry(getattr(func, "__name__", ""))
        outside = self._stack and not any(inside for _, inside in self._stack)
        if known is not None and outside and known.op.name in _COMBINING:
            self.seen[self._stack[-1][0], known.op.name] = None
        return func(*args, **(kwargs or {}))

    def finish(self) -> list[tuple[str, str]]:
        """Remove the hooks; return (module, operator) of every recorded call."""
        for handle in self._handles:
            handle.remove()
        return list(self.seen)


class _Push:
    def __init__(self, stack: list[tuple[str, bool]], path: str, inside: bool) -> None:
        self.stack, self.entered = stack, (path, inside)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.entered)


class _Pop:
    def __init__(self, stack: list[tuple[str, bool]]) -> None:
        self.stack = stack

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        self.stack.pop()
