"""Quantization error of each layer: isolated on the float model's values, or cumulative with all layers before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from onnxq.errors import ConfigError, DataError, PlanError
from onnxq.evaluation.accumulator import ErrorAccumulator
from onnxq.nearest import suggest_names
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing import as_inputs, bind_inputs, find_module, run_call, use_eval_mode

Array = NDArray[np.float64]
Metric = Callable[[Array, Array], float]
METRICS: Mapping[str, Callable[[ErrorAccumulator], float]] = {
    "sqnr": lambda sums: sums.result().sqnr_db,
    "mse": lambda sums: sums.noise / max(sums.count, 1) if sums.comparable else math.inf,
    "cosine": lambda sums: sums.result().cosine,
    "max_abs": lambda sums: sums.result().max_abs,
}
Mode = Literal["isolated", "cumulative"]


def list_batches(data: Any) -> Iterable[Any]:
    """Batches of the data: a tensor or mapping is one batch, anything else is iterated over."""
    return [data] if isinstance(data, (Tensor, dict)) else data


class _ErrorSums:
    """Errors of each layer's outputs, float against quantized, summed over batches so that memory does not grow.

    metric: of METRICS, or a function of two arrays whose values are averaged over batches. Raises ConfigError with the
    nearest names.
    """

    def __init__(self, metric: str | Metric) -> None:
        if isinstance(metric, str) and metric not in METRICS:
            raise ConfigError(f"metric {metric!r}", "does not exist", suggest_names(metric, METRICS), code="Q304")
        self.metric = metric
        self.sums: dict[str, ErrorAccumulator] = {}
        self._own: dict[str, list[float]] = {}

    def add(self, key: str, reference: Any, value: Any) -> None:
        """Take in one output."""
        if isinstance(reference, (tuple, list)):
            for k, (one, other) in enumerate(zip(reference, value, strict=True)):
                self.add(f"{key}[{k}]", one, other)
            return
        if not isinstance(reference, Tensor) or not reference.is_floating_point():
            return
        ref, got = (t.detach().double().cpu().numpy() for t in (reference, value))
        self.sums.setdefault(key, ErrorAccumulator(key)).update(ref, got)
        if not isinstance(self.metric, str):
            self._own.setdefault(key, []).append(float(self.metric(ref, got)))

    def result(self) -> dict[str, float]:
        """Layer -> metric over all batches."""
        if isinstance(self.metric, str):
            return {key: METRICS[self.metric](sums) for key, sums in self.sums.items()}
        return {key: math.fsum(values) / len(values) for key, values in self._own.items()}


@contextmanager
def switch_quantizers(model: nn.Module, on: bool) -> Any:
    """Run a block with all quantizers off, or (on) with those that are on; afterwards the switches are as before."""
    held = [(q, q.enabled) for q in model.modules() if isinstance(q, Quantizer)]
    for quantizer, enabled in held:
        quantizer.enabled = on and enabled
    try:
        yield
    finally:
        for quantizer, enabled in held:
            quantizer.enabled = enabled


def measure_graph(model: fx.GraphModule, data: Any, metric: str | Metric, mode: Mode) -> dict[str, float]:
    """Error of every layer that quantizes its inputs or weight. Switches do not change."""
    totals = _ErrorSums(metric)
    with use_eval_mode(model):
        for batch in list_batches(data):
            _PairedRun(model, mode, totals).run(*as_inputs(batch))
    if not totals.sums:
        raise DataError(
            "data", "no batch, or nothing is quantized", "give batches, and switch quantization on", code="Q203"
        )
    return totals.result()


class _PairedRun:
    """Runs the float and the quantized model side by side, call by call."""

    def __init__(self, model: fx.GraphModule, mode: Mode, totals: _ErrorSums) -> None:
        self.model, self.mode, self.totals = model, mode, totals
        self.float: dict[fx.Node, Any] = {}
        self.quantized: dict[fx.Node, Any] = {}
        self.calls: dict[str, int] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run one batch and add the errors of its layers."""
        inputs = iter(bind_inputs(self.model.graph, args, kwargs))
        left = {node: len(node.users) for node in self.model.graph.nodes}  # readers to come; at 0 values are freed
        for node in self.model.graph.nodes:
            if node.op == "placeholder":
                self.float[node] = self.quantized[node] = next(inputs)
            elif node.op == "output":
                if self.mode == "cumulative":
                    found = [fx.map_arg(node.args[0], env.__getitem__) for env in (self.float, self.quantized)]
                    self.totals.add("output", *_flatten_pair(found))
            else:
                self._run_both(node)
            for source in node.all_input_nodes:
                left[source] -= 1
                if left[source] == 0:
                    del self.float[source], self.quantized[source]

    def _run_both(self, node: fx.Node) -> None:
        module = find_module(self.model, node)
        # A quantizer is an identity in the float model.
        if isinstance(module, Quantizer):
            source = node.args[0]
            self.float[node] = self.float[source]  # type: ignore[index]
            self.quantized[node] = module(self.quantized[source])  # type: ignore[index]
            return
        with switch_quantizers(self.model if module is None else module, False):
            self.float[node] = self._run_node(node, self.float)
        self.quantized[node] = self._run_node(node, self.quantized)
        if module is not None and self._quantizes(node, module):
            call = self.calls.get(str(node.target), 0)
            self.calls[str(node.target)] = call + 1
            self.totals.add(f"{node.target}@{call}" if call else str(node.target), self.float[node],
                            self.quantized[node])  # fmt: skip
        if self.mode == "isolated":
            self.quantized[node] = self.float[node]  # the next layer starts from the float value again

    def _run_node(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        return run_call(self.model, node, *(fx.map_arg(part, env.__getitem__) for part in (node.args, node.kwargs)))

    def _quantizes(self, node: fx.Node, module: nn.Module) -> bool:
        """True for a layer with active quantizers inside it or directly in front of it."""
        if any(isinstance(q, Quantizer) and q.active for q in module.modules()):
            return True
        sources = [s for s in node.all_input_nodes if s.op == "call_module"]
        held = [self.model.get_submodule(str(source.target)) for source in sources]
        return any(isinstance(q, Quantizer) and q.active for q in held)


def _flatten_pair(found: list[Any]) -> list[Any]:
    both = [torch.utils._pytree.tree_leaves(value) for value in found]
    return both if len(both[0]) != 1 else [leaves[0] for leaves in both]


def measure_layers(model: nn.Module, data: Any, metric: str | Metric, mode: Mode) -> dict[str, float]:
    """As measure_graph, for a model that could not be traced: errors of the layers that hold quantizers."""
    layers = {
        name: module for name, module in model.named_modules()
        if any(isinstance(child, Quantizer) for child in module.children())
        or "input_quantizers" in module._modules
    }  # fmt: skip
    totals = _ErrorSums(metric)
    with use_eval_mode(model):
        for batch in list_batches(data):
            args, kwargs = as_inputs(batch)
            if mode == "isolated":
                _measure_isolated(model, layers, args, kwargs, totals)
                continue
            # Two runs of the whole model; calls of a layer are paired by their order.
            seen: list[dict[str, list[Any]]] = []
            for on in (False, True):
                with switch_quantizers(model, on), _catch_outputs(model, layers) as outputs:
                    outputs["output"] = [model(*args, **kwargs)]
                seen.append(outputs)
            for name, values in seen[0].items():
                for k, value in enumerate(values):
                    totals.add(f"{name}@{k}" if k else name, *_flatten_pair([value, seen[1][name][k]]))
    return totals.result()


@contextmanager
def _catch_outputs(model: nn.Module, layers: Mapping[str, nn.Module]) -> Any:
    found: dict[str, list[Any]] = {}
    handles = [
        layer.register_forward_hook(lambda _m, _a, out, name=name: found.setdefault(name, []).append(out))
        for name, layer in layers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _measure_isolated(
    model: nn.Module, layers: Mapping[str, nn.Module], args: Any, kwargs: Any, totals: _ErrorSums
) -> None:
    """Run the float model on one batch, and every layer once more with its own quantizers on."""
    # switch_quantizers() turns all off; each layer gets its own switches back while it runs again.
    held = {q: q.enabled for q in model.modules() if isinstance(q, Quantizer)}
    busy: list[str] = []
    calls: dict[str, int] = {}

    def again(layer: nn.Module, given: Any, named: Any, out: Any, name: str) -> None:
        if busy:  # a layer inside the one that runs again
            return
        busy.append(name)
        own = [q for q in layer.modules() if isinstance(q, Quantizer)]
        for q in own:
            q.enabled = held[q]
        try:
            value = layer(*given, **named)
        finally:
            busy.pop()
            for q in own:
                q.enabled = False
        call = calls.get(name, 0)
        calls[name] = call + 1
        totals.add(f"{name}@{call}" if call else name, *_flatten_pair([out, value]))

    handles = [
        layer.register_forward_hook(lambda m, a, k, out, name=name: again(m, a, k, out, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with switch_quantizers(model, False):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def check_mode(mode: str) -> None:
    """Raise ConfigError for an unknown mode."""
    if mode not in ("isolated", "cumulative"):
        raise ConfigError(f"mode {mode!r}", "does not exist", "write isolated or cumulative", code="Q304")


def check_any_on(model: nn.Module) -> None:
    """Raise PlanError if no quantizer is on."""
    if not any(q.active for q in model.modules() if isinstance(q, Quantizer)):
        raise PlanError("QuantModel.quantization_error()", "no quantizer is on", "call set_quant() first", code="Q409")
