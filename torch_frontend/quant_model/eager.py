"""Modules that cannot be traced, converted one by one: layers change class, inputs are quantized by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onnxq.config import Config, matches
from onnxq.sites import Refusal, Role, Unquantized
from onnxq.targets import target
from torch_frontend.qmodules import (
    Entry,
    WeightQuantized,
    convertible,
    of_function,
    of_method,
    of_module,
    shallow,
    swapped,
)
from torch_frontend.quant_model.attach import WEIGHT, new_quantizer
from torch_frontend.quant_model.draft import Pair
from torch_frontend.quant_model.places import PLACES
from torch_frontend.quant_model.units import Asker, asker_of
from torch_frontend.quant_model.wishes import Wishes
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing import Named

INPUTS = "input_quantizers"
# Operators without a weight that people use as modules where a model cannot be traced. The others (activations,
# norms) stay float: what stands before them is not known, and a pair there may round twice.
_BY_HAND = ("add", "mul", "matmul", "cat")
_COMBINING = ("add", "sub", "mul", "matmul", "attention", "cat", "conv", "linear", "conv_transpose")


def quantize_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: the module's data arguments go through its `input_quantizers`, by name."""
    held = module._modules[INPUTS]
    given, named = list(args), dict(kwargs)
    for name, quantizer in held.named_children():  # type: ignore[union-attr]
        param, _, position = name.rpartition("_")
        k = int(position)
        if k < len(given):
            given[k] = _through(quantizer, given[k])
        elif param in named:
            named[param] = _through(quantizer, named[param])
    return tuple(given), named


def _through(quantizer: nn.Module, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_through(quantizer, item) for item in value]
    return quantizer(value) if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass
class Converted:
    """A module converted without tracing. paths: site -> module path of its quantizer, relative to the module."""

    module: nn.Module
    activations: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    reasons: list[Unquantized] = field(default_factory=list)
    askers: list[Asker] = field(default_factory=list)


def convert(model: nn.Module, config: Config, wishes: Wishes, prefix: str = "") -> Converted:
    """A copy of the module tree that shares its tensors, with quantizers at every layer the target has a place for.

    prefix: the module's own qualified name, with which sites begin. Its activation sites are inputs of layers
    (`<path>.in`), since what feeds them is not known; a layer that is called twice has one.
    """
    out = Converted(copied(model))
    done: dict[int, nn.Module] = {}
    shared: dict[tuple[int, Any], Quantizer] = {}
    for path, parent, leaf in list(_children(out.module)):
        full = f"{prefix}.{path}" if prefix else path
        module = parent._modules[leaf]
        if module is None or (config.torch.skip_trace and _skipped(config, full)):
            continue
        if id(module) in done:
            parent._modules[leaf] = done[id(module)]
            continue
        known = of_module(module)
        if known is None:
            continue
        done[id(module)] = _convert_one(module, Named(full, 0, known), path, config, wishes, out, shared)
        parent._modules[leaf] = done[id(module)]
    return out


def copied(model: nn.Module, memo: dict[int, nn.Module] | None = None) -> nn.Module:
    """The module tree anew, with the same tensors."""
    memo = {} if memo is None else memo
    if id(model) not in memo:
        memo[id(model)] = made = shallow(model)
        for name, child in made._modules.items():
            made._modules[name] = None if child is None else copied(child, memo)
    return memo[id(model)]


def _children(model: nn.Module, above: str = "") -> Iterator[tuple[str, nn.Module, str]]:
    for leaf, child in model._modules.items():
        if child is not None:
            path = f"{above}.{leaf}" if above else leaf
            yield path, model, leaf
            yield from _children(child, path)


def _skipped(config: Config, path: str) -> bool:
    parts = path.split(".")
    return any(matches(config.torch.skip_trace, ".".join(parts[:k])) for k in range(1, len(parts) + 1))


def _convert_one(
    module: nn.Module, name: Named, path: str, config: Config, wishes: Wishes, out: Converted, shared: dict[Any, Any]
) -> nn.Module:
    assert name.entry is not None
    op, asker = name.entry.op, asker_of(name)
    out.askers.append(asker)
    place = PLACES[config.target].get(op.name)
    if op.refused is not None:
        out.reasons.append(Refusal(name.path, *op.refused, "no-kernel", "R101"))
        return module
    if op.weight is None and op.name not in _BY_HAND:
        return module
    if place is None or not place.compute:
        engine = target(config.target, config.mode)
        out.reasons += [why for word in op.onnx if (why := engine.without_kernel(name.path, word)) is not None]
        return module
    weighted = name.entry.qmodule is not None and issubclass(name.entry.qmodule, WeightQuantized)
    if weighted and (why := convertible(module)):
        out.reasons.append(Refusal(name.path, why, "give it a plain weight", "weight", "R110"))
        return module
    made = module
    if weighted:
        made = _weight(module, name, path, asker, config, wishes, out, shared)
    if config.mode != "weight-only" and place.inputs == "all":
        _inputs(made, name.entry, name.path, path, asker, config, wishes, out)
    return made


def _weight(
    module: nn.Module, name: Named, path: str, asker: Asker, config: Config, wishes: Wishes, out: Converted,
    shared: dict[Any, Any],
) -> nn.Module:  # fmt: skip
    assert name.entry is not None
    op, site = name.entry.op, f"{name.path}.weight"
    answer = wishes.answer(Role.WEIGHT, site, [asker])
    if answer.stays_float:
        return module
    spec = answer.wish.spec(op.block_axis if answer.wish.granularity == "block" else op.weight_axis)
    made = swapped(module)
    key = (id(made._parameters["weight"]), spec, answer.quantizer)
    if key not in shared:
        pair = Pair(site, Role.WEIGHT, spec, answer.wish.observer, answer.quantizer)
        shared[key] = new_quantizer(pair, config)
        out.weights[site] = f"{path}.{WEIGHT}"
    made.add_module(WEIGHT, shared[key])
    return made


def _inputs(
    module: nn.Module, entry: Entry, full: str, path: str, asker: Asker, config: Config, wishes: Wishes, out: Converted
) -> None:
    policy = config.torch.policy(entry.op.name)
    if policy is not None and policy.policy == "none":
        return
    held = nn.Module()
    for k, param in enumerate(entry.data):
        site = f"{full}.in{k or ''}"
        answer = wishes.answer(Role.ACTIVATION, site, [asker])
        if answer.stays_float:
            continue
        position = entry.params.index(param)
        spec = answer.wish.spec(entry.op.channel)
        pair = Pair(site, Role.ACTIVATION, spec, answer.wish.observer, answer.quantizer)
        held.add_module(f"{param}_{position}", new_quantizer(pair, config))
        out.activations[site] = f"{path}.{INPUTS}.{param}_{position}"
    if held._modules:
        module.add_module(INPUTS, held)
        module.register_forward_pre_hook(quantize_inputs, with_kwargs=True)


class CallsOutside(TorchFunctionMode):
    """While it is on: functions that combine or multiply tensors in code that was not traced, by module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], None] = {}
        self._stack: list[tuple[str, bool]] = []
        self._handles = []
        for path, module in model.named_modules():
            inside = of_module(module) is not None or isinstance(module, (WeightQuantized, Quantizer))
            self._handles.append(module.register_forward_pre_hook(_Push(self._stack, path, inside)))
            self._handles.append(module.register_forward_hook(_Pop(self._stack), always_call=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call, then make it."""
        known = of_function(func) or of_method(getattr(func, "__name__", ""))
        outside = self._stack and not any(inside for _, inside in self._stack)
        if known is not None and outside and known.op.name in _COMBINING:
            self.seen[self._stack[-1][0], known.op.name] = None
        return func(*args, **(kwargs or {}))

    def done(self) -> list[tuple[str, str]]:
        """Take the hooks off; (module, operator) of every call."""
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
