"""Quantization error of each layer: isolated on the float model's values, or cumulative with all layers before it."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from onnxq.arrays import Array64
from onnxq.errors import ConfigError, DataError, PlanError, suggest_names
from onnxq.evaluation.accumulator import ErrorAccumulator
from torch_frontend.quantizers import Quantizer, override_switches, quantizers_of
from torch_frontend.tracing.modules import Inputs, as_inputs, find_module, list_batches
from torch_frontend.tracing.values import bind_inputs, use_eval_mode

Metric = Callable[[Array64, Array64], float]
# Of error sums, and the number of elements that they are of.
METRICS: Mapping[str, Callable[[ErrorAccumulator, int], float]] = {
    "sqnr": lambda sums, _: sums.result().sqnr_db,
    "mse": lambda sums, count: sums.noise / max(count, 1) if sums.comparable else math.inf,
    "cosine": lambda sums, _: sums.result().cosine,
    "max_abs": lambda sums, _: sums.result().max_abs,
}
Mode = Literal["isolated", "cumulative"]


class _ErrorSums:
    """Errors of each layer's outputs, float against quantized, summed over batches so that memory does not grow.

    metric: of METRICS, or a function of two arrays whose values are averaged over batches. Raises ConfigError with the
    nearest names.
    """

    def __init__(self, metric: str | Metric) -> None:
        if isinstance(metric, str) and metric not in METRICS:
            raise ConfigError(
                f"metric {metric!r}", "does not exist", suggest_names(metric, METRICS), code="Q304"
            )
        self.metric = metric
        self.sums: dict[str, ErrorAccumulator] = {}
        self.counts: Counter[str] = Counter()
        self._own: dict[str, list[float]] = {}

    def add_output(self, key: str, reference: Any, value: Any) -> None:
        """Take in one output, of one or several tensors."""
        pairs = list(zip(*map(torch.utils._pytree.tree_leaves, (reference, value)), strict=True))
        for k, pair in enumerate(pairs):
            self._add_tensor(f"{key}[{k}]" if len(pairs) > 1 else key, *pair)

    def _add_tensor(self, key: str, reference: Any, value: Any) -> None:
        if not isinstance(reference, Tensor) or not reference.is_floating_point():
            return
        ref, got = (t.detach().double().cpu().numpy() for t in (reference, value))
        self.sums.setdefault(key, ErrorAccumulator(key)).update(ref, got)
        self.counts[key] += ref.size
        if not isinstance(self.metric, str):
            self._own.setdefault(key, []).append(float(self.metric(ref, got)))

    def compute_metrics(self) -> dict[str, float]:
        """Layer -> metric over all batches."""
        if isinstance(self.metric, str):
            return {
                key: METRICS[self.metric](sums, self.counts[key]) for key, sums in self.sums.items()
            }
        return {key: math.fsum(values) / len(values) for key, values in self._own.items()}


def measure_graph(
    model: fx.GraphModule, data: Any, metric: str | Metric, mode: Mode
) -> dict[str, float]:
    """Error of every layer that quantizes its inputs or weight. Switches do not change."""
    totals = _ErrorSums(metric)
    with use_eval_mode(model):
        for batch in list_batches(data):
            _PairedRun(model, mode, totals).measure_batch(as_inputs(batch))
    if not totals.sums:
        raise DataError(
            "data",
            "no batch, or nothing is quantized",
            "give batches, and switch quantization on",
            code="Q203",
        )
    return totals.compute_metrics()


class _PairedRun(fx.Interpreter):
    """Runs the float and the quantized model side by side, call by call.

    The interpreter's values are pairs: of the float and of the quantized model.
    """

    def __init__(self, model: fx.GraphModule, mode: Mode, totals: _ErrorSums) -> None:
        super().__init__(model)
        self.mode = mode
        self.totals = totals
        self.calls: Counter[str] = Counter()

    def measure_batch(self, inputs: Inputs) -> None:
        """Run one batch and add the errors of its layers."""
        self.calls.clear()
        self.run(*bind_inputs(self.graph, inputs))

    def run_node(self, n: fx.Node) -> Any:
        """The node's results in both models."""
        if n.op == "placeholder":
            return (self.placeholder(n.target, n.args, {}),) * 2
        module = find_module(self.module, n)
        # A quantizer is an identity in the float model.
        if isinstance(module, Quantizer):
            plain, value = self.env[n.all_input_nodes[0]]
            return plain, module(value)
        with override_switches(quantizers_of(module or self.module), False):
            plain = self._run_node_in(n, 0)
        value = self._run_node_in(n, 1)
        if n.op == "output" and self.mode == "cumulative":
            self.totals.add_output("output", plain, value)
        elif module is not None and self._is_quantized(n, module):
            self.totals.add_output(_name_call(str(n.target), self.calls), plain, value)
        # In isolation the next layer starts from the float value again.
        return plain, value if self.mode == "cumulative" else plain

    def _run_node_in(self, n: fx.Node, which: int) -> Any:
        arguments = fx.map_arg((n.args, n.kwargs), lambda s: self.env[s][which])
        return getattr(self, n.op)(n.target, *arguments)

    def _is_quantized(self, node: fx.Node, module: nn.Module) -> bool:
        """True for a layer with active quantizers inside it or directly in front of it."""
        if any(q.active for q in quantizers_of(module)):
            return True
        sources = (find_module(self.module, source) for source in node.all_input_nodes)
        return any(isinstance(q, Quantizer) and q.active for q in sources)


def _name_call(name: str, calls: Counter[str]) -> str:
    """The name of a layer's next call: `name`, then `name@1` …"""
    calls[name] += 1
    return f"{name}@{calls[name] - 1}" if calls[name] > 1 else name


# Of name, float output, quantized output.
_Add = Callable[[str, Any, Any], None]


def measure_layers(
    model: nn.Module, data: Any, metric: str | Metric, mode: Mode
) -> dict[str, float]:
    """As measure_graph, for a model that could not be traced: errors of the layers that hold quantizers."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(child, Quantizer) for child in module.children())
        or "input_quantizers" in module._modules
    }
    totals = _ErrorSums(metric)
    run = _run_isolated if mode == "isolated" else _run_twice
    with use_eval_mode(model):
        for batch in list_batches(data):
            calls: Counter[str] = Counter()

            def add(name: str, plain: Any, value: Any, calls: Counter[str] = calls) -> None:
                totals.add_output(_name_call(name, calls), plain, value)

            run(model, layers, as_inputs(batch), add)
    return totals.compute_metrics()


def _run_watched(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    inputs: Inputs,
    see: Callable[[str, nn.Module, Any, Any, Any], None],
) -> Any:
    """The model's output; `see` gets the name of each layer that is called, itself, its arguments and its output."""
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(see, name), with_kwargs=True))
        return inputs.run_model(model)


def _run_twice(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Inputs, add: _Add
) -> None:
    """Add every layer's outputs in the float and in the quantized model, call by call."""

    def run() -> dict[str, list[Any]]:
        outputs = defaultdict(list)
        result = _run_watched(
            model,
            layers,
            inputs,
            lambda name, _layer, _args, _kwargs, out: outputs[name].append(out),
        )
        return {**outputs, "output": [result]}

    with override_switches(quantizers_of(model), False):
        plain = run()
    quantized = run()
    # Paired by layer: control flow on values may go another way in the quantized model.
    for name, values in plain.items():
        for pair in zip(values, quantized.get(name, ()), strict=False):
            add(name, *pair)


def _run_isolated(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Inputs, add: _Add
) -> None:
    """Add every layer's output in the float model, and that of its own quantizers on the same inputs."""
    enabled = {q: q.enabled for q in quantizers_of(model)}
    busy: list[str] = []

    def run_again(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if busy:  # a layer inside the one that runs again
            return
        busy.append(name)
        with override_switches(quantizers_of(layer), True):
            for quantizer in quantizers_of(layer):
                quantizer.enabled = enabled[quantizer]
            add(name, out, layer(*args, **kwargs))
        busy.pop()

    with override_switches(quantizers_of(model), False):
        _run_watched(model, layers, inputs, run_again)


def check_request(model: nn.Module, mode: str) -> None:
    """Raise ConfigError for an unknown mode, PlanError if no quantizer is on."""
    if mode not in ("isolated", "cumulative"):
        raise ConfigError(
            f"mode {mode!r}", "does not exist", "write isolated or cumulative", code="Q304"
        )
    if not any(q.active for q in quantizers_of(model)):
        raise PlanError(
            "QuantModel.quantization_error()",
            "no quantizer is on",
            "call set_quant() first",
            code="Q409",
        )
