"""From batches to numbers: observers watch the user's own forward passes; `asym` then walks them once more."""

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
from torch_frontend.tracing import bound, evaluating

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def start(quantizers: Iterable[Quantizer]) -> None:
    """Activations observe and do not quantize; weights are looked at when numbers are made."""
    for quantizer in quantizers:
        quantizer.observing = quantizer.role is not Role.WEIGHT and quantizer.disabled_reason is None
        quantizer.enabled = False


def stop(quantizers: Iterable[Quantizer]) -> None:
    """Nothing observes any more."""
    for quantizer in quantizers:
        quantizer.observing = False


def weights(quantizers: Iterable[Quantizer], tensors: Mapping[str, Tensor]) -> None:
    """Numbers of all weights. tensors: site -> weight."""
    with torch.no_grad():
        for quantizer in quantizers:
            quantizer.observe(tensors[quantizer.site])
            quantizer.calc_qparams()


def activations(quantizers: Iterable[Quantizer]) -> None:
    """Numbers of all activations. Raises CalibrationError that lists the sites no batch reached."""
    missing = []
    for quantizer in quantizers:
        if isinstance(quantizer, Follower) or quantizer.disabled_reason is not None:
            continue
        try:
            quantizer.calc_qparams()
            keep_bound(quantizer)
        except CalibrationError as error:
            if error.code != "Q502":
                raise
            missing.append(quantizer.site)
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        fix = "run batches between prepare_calibration() and calc_qparams(), or disable() what none can reach"
        raise CalibrationError(shown, "no batch reached it", fix, code="Q502")


def keep_bound(quantizer: Quantizer) -> None:
    """Lower a scale by the last bit where its top level would lie beyond what the activation in front promises.

    ONNX Runtime drops a Clip only when every level lies inside it.
    """
    bound = getattr(quantizer, "bound", (None, None))
    if bound == (None, None) or not quantizer.calibrated:
        return
    held = quantizer.qparams()
    low, high = (end.cpu().numpy() for end in quantizer.dequantized_range())
    lowest, highest = bound
    inside = (lowest is None or low >= lowest) and (highest is None or high <= highest)
    if not inside and quantizer.spec.granularity == PerTensor():
        quantizer.load_qparams(qparams_from_range(low, high, quantizer.spec, origin=held.origin, bound=bound))


def check_numbers(quantizers: Iterable[Quantizer]) -> None:
    """Raise CalibrationError naming every active site without usable numbers: none, NaN, inf, no scale above 0."""
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


def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """A batch as it was given, on the host."""

    def keep(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    tree: Batch = torch.utils._pytree.tree_map(keep, (args, kwargs))
    return tree


class Walk:
    """Every call of the graph, once, over all batches: each quantizer observes what its quantized predecessors give.

    Weights have their numbers before. weights, activations: which kinds count as quantized on the way. A site that
    shares its numbers with others keeps those from the float pass: it has no predecessors of its own.
    """

    def __init__(self, model: fx.GraphModule, *, weights: bool, activations: bool) -> None:
        self.model, self.activations = model, activations
        found = [module for module in model.modules() if isinstance(module, Quantizer)]
        self.leaders = {id(q.leader) for q in found if isinstance(q, Follower)}
        for quantizer in found:
            quantizer.observing = False
            quantizer.enabled = weights if quantizer.role is Role.WEIGHT else False

    def run(self, batches: Sequence[Batch]) -> None:
        """Walk. Values are freed behind their last reader."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        inputs = [iter(bound(self.model.graph, *batch)) for batch in batches]
        values: dict[fx.Node, list[Any]] = {}
        left = {node: len(node.users) for node in self.model.graph.nodes}
        with evaluating(self.model):
            for node in self.model.graph.nodes:
                if node.op == "placeholder":
                    values[node] = [_moved(next(one), device) for one in inputs]
                elif node.op == "output":
                    break
                else:
                    values[node] = self._node(node, values, len(batches))
                for source in node.all_input_nodes:
                    left[source] -= 1
                    if left[source] == 0:
                        del values[source]

    def _node(self, node: fx.Node, values: Mapping[fx.Node, list[Any]], count: int) -> list[Any]:
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            return [getattr(self.model.get_submodule(owner), leaf)] * count
        arguments = [
            (fx.map_arg(node.args, lambda n, k=k: values[n][k]), fx.map_arg(node.kwargs, lambda n, k=k: values[n][k]))
            for k in range(count)
        ]
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            self._calibrate(module, arguments)
            return [module(*args, **kwargs) for args, kwargs in arguments]
        if node.op == "call_method":
            return [getattr(args[0], str(node.target))(*args[1:], **kwargs) for args, kwargs in arguments]
        return [node.target(*args, **kwargs) for args, kwargs in arguments]  # type: ignore[operator]

    def _calibrate(self, module: nn.Module, arguments: list[Any]) -> None:
        """Numbers of a quantizer, or of those inside a module that was not traced, from what comes in."""
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


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
