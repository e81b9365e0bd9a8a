"""Calibration: quantizers observe the user's own forward passes; `asym` then runs the batches once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from onnxq.errors import CalibrationError, OnnxqError
from onnxq.numerics import qparams_from_range
from onnxq.sites import Role
from onnxq.spec import PerTensor
from torch_frontend.qmodules import WeightQuantized
from torch_frontend.quant_model.follower import Follower
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing import bind_inputs, find_module, read_attribute, run_call, use_eval_mode

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def start_observing(quantizers: Iterable[Quantizer]) -> None:
    """Let activations observe, and switch all quantization off; weights are observed in `calibrate_weights`."""
    for quantizer in quantizers:
        quantizer.observing = quantizer.role is not Role.WEIGHT and quantizer.disabled_reason is None
        quantizer.enabled = False


def stop_observing(quantizers: Iterable[Quantizer]) -> None:
    """Stop observing."""
    for quantizer in quantizers:
        quantizer.observing = False


def calibrate_weights(quantizers: Iterable[Quantizer], tensors: Mapping[str, Tensor]) -> None:
    """Calibrate all weights. tensors: site -> weight."""
    with torch.no_grad():
        for quantizer in quantizers:
            # Observed again at every calibration: training moves weights.
            quantizer.observe(tensors[quantizer.site])
            quantizer.calc_qparams()


def calibrate_activations(quantizers: Iterable[Quantizer]) -> None:
    """Calibrate all activations. Raises CalibrationError that lists the sites no batch reached."""
    missing = []
    for quantizer in quantizers:
        # A follower has its leader's qparams.
        if isinstance(quantizer, Follower) or quantizer.disabled_reason is not None:
            continue
        try:
            quantizer.calc_qparams()
            keep_bound(quantizer)
        except CalibrationError as error:
            if error.code != "Q502":  # nothing was seen; such sites are reported together
                raise
            missing.append(quantizer.site)
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        fix = "run batches between prepare_calibration() and calc_qparams(), or disable() what none can reach"
        raise CalibrationError(shown, "no batch reached it", fix, code="Q502")


def keep_bound(quantizer: Quantizer) -> None:
    """Lower a scale by its last bit if a value it represents lies outside the bound of the activation in front.

    ONNX Runtime drops a Clip only if all values that the scale represents lie inside it.
    """
    # (lowest, highest) of a fused Clip, set by `attach`; quantizers made by hand have none.
    bound = getattr(quantizer, "bound", (None, None))
    if bound == (None, None) or not quantizer.calibrated:
        return
    held = quantizer.qparams()
    low, high = (end.cpu().numpy() for end in quantizer.dequantized_range())
    lowest, highest = bound
    inside = (lowest is None or low >= lowest) and (highest is None or high <= highest)
    if not inside and quantizer.spec.granularity == PerTensor():
        quantizer.load_qparams(qparams_from_range(low, high, quantizer.spec, origin=held.origin, bound=bound))


def check_qparams(quantizers: Iterable[Quantizer]) -> None:
    """Raise CalibrationError naming the sites without legal qparams: none, NaN, inf, or a scale not above 0."""
    wrong: list[OnnxqError] = []
    for quantizer in quantizers:
        if quantizer.disabled_reason is None:
            try:
                quantizer.qparams()
            except OnnxqError as error:
                wrong.append(error)
    if wrong:
        more = f"; and so {', '.join(e.subject for e in wrong[1:4])}" + (" …" if len(wrong) > 4 else "")
        first = wrong[0]
        raise CalibrationError(
            first.subject, first.cause + (more if len(wrong) > 1 else ""), first.fix, code=first.code
        )


def copy_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """A copy of a batch on the host, which its owner may then change."""

    def keep(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    tree: Batch = torch.utils._pytree.tree_map(keep, (args, kwargs))
    return tree


class LayerwiseCalibration:
    """One pass over the calls of a graph, all batches at each call: quantizers observe outputs of quantized calls.

    Weights are calibrated before. weights, activations: whether they are quantized on the way. A site that shares its
    qparams with others keeps those of the float pass, since the others are not calibrated yet when it is reached.
    """

    def __init__(self, model: fx.GraphModule, *, weights: bool, activations: bool) -> None:
        self.model, self.activations = model, activations
        found = [module for module in model.modules() if isinstance(module, Quantizer)]
        self.leaders = {id(q.leader) for q in found if isinstance(q, Follower)}
        for quantizer in found:
            quantizer.observing = False
            quantizer.enabled = weights if quantizer.role is Role.WEIGHT else False

    def run(self, batches: Sequence[Batch]) -> None:
        """Calibrate the activations of the graph on these batches."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        inputs = [iter(bind_inputs(self.model.graph, *batch)) for batch in batches]
        values: dict[fx.Node, list[Any]] = {}
        left = {node: len(node.users) for node in self.model.graph.nodes}  # readers to come; at 0 the value is freed
        with use_eval_mode(self.model):
            for node in self.model.graph.nodes:
                if node.op == "placeholder":
                    values[node] = [_move_value(next(one), device) for one in inputs]
                elif node.op == "output":
                    break
                else:
                    values[node] = self._run_node(node, values, len(batches))
                for source in node.all_input_nodes:
                    left[source] -= 1
                    if left[source] == 0:
                        del values[source]

    def _run_node(self, node: fx.Node, values: Mapping[fx.Node, list[Any]], count: int) -> list[Any]:
        """The node's result for each batch; quantizers are calibrated first."""
        if node.op == "get_attr":
            return [read_attribute(self.model, str(node.target))] * count
        arguments = [
            (fx.map_arg(node.args, lambda n, k=k: values[n][k]), fx.map_arg(node.kwargs, lambda n, k=k: values[n][k]))
            for k in range(count)
        ]
        if (module := find_module(self.model, node)) is not None:
            self._calibrate_module(module, arguments)
        return [run_call(self.model, node, args, kwargs) for args, kwargs in arguments]

    def _calibrate_module(self, module: nn.Module, arguments: list[Any]) -> None:
        """Calibrate a quantizer, or those inside a module that was not traced, on these arguments."""
        # A traced layer has its inputs' quantizers in front of it, as calls of their own.
        if isinstance(module, WeightQuantized) and "input_quantizers" not in module._modules:
            return
        inside = [q for q in module.modules() if isinstance(q, Quantizer) and q.role is not Role.WEIGHT]
        inside = [q for q in inside if q.disabled_reason is None]
        fresh = [q for q in inside if not isinstance(q, Follower) and id(q) not in self.leaders]
        for quantizer in fresh:
            quantizer.observing = True
        for args, kwargs in arguments if fresh else ():
            module(*args, **kwargs)
        for quantizer in fresh:
            quantizer.observing = False
            quantizer.calc_qparams()
            keep_bound(quantizer)
        for quantizer in inside:
            quantizer.enabled = self.activations


def _move_value(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
