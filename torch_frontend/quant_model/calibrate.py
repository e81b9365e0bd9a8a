"""Calibration: quantizers observe the user's own forward passes; `asym` then runs the batches once more."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from onnxq.errors import CalibrationError, OnnxqError
from onnxq.numerics import qparams_from_range
from onnxq.spec import PerTensor
from onnxq.wording import join_names
from torch_frontend.qmodules import WeightQuantized
from torch_frontend.quantizers import Dynamic, Quantizer, quantizers_of
from torch_frontend.quantizers.borrowed import Follower
from torch_frontend.tracing.modules import Inputs, find_module
from torch_frontend.tracing.values import bind_inputs, use_eval_mode


def start_observing(quantizers: Iterable[Quantizer]) -> None:
    """Let activations observe, and switch all quantization off; weights are observed in `calibrate_weights`."""
    for quantizer in quantizers:
        quantizer.observing = not quantizer.role.is_weight and quantizer.disabled_reason is None
        quantizer.enabled = False


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
        # A follower has its leader's qparams, a dynamic quantizer none.
        if not quantizer.slots or quantizer.disabled_reason is not None:
            continue
        try:
            quantizer.calc_qparams()
            keep_bound(quantizer)
        except CalibrationError as error:
            if error.code != "Q502":  # nothing was seen; such sites are reported together
                raise
            missing.append(quantizer.site)
    if missing:
        fix = "run batches between prepare_calibration() and calc_qparams(), or disable() what none can reach"
        raise CalibrationError(join_names(missing, 5), "no batch reached it", fix, code="Q502")


def keep_bound(quantizer: Quantizer) -> None:
    """Lower a scale by its last bit if a value it represents lies outside the bound of the activation in front.

    ONNX Runtime drops a Clip only if all values that the scale represents lie inside it.
    """
    lowest, highest = quantizer.bound
    if (
        quantizer.bound == (None, None)
        or not quantizer.slots
        or not quantizer.calibrated
        or quantizer.spec.granularity != PerTensor()
    ):
        return
    low, high = (end.detach().cpu().numpy() for end in quantizer.dequantized_range())
    if (lowest is not None and low < lowest) or (highest is not None and high > highest):
        origin = quantizer.qparams().origin
        quantizer.load_qparams(
            qparams_from_range(low, high, quantizer.spec, origin=origin, bound=quantizer.bound)
        )


def check_qparams(quantizers: Iterable[Quantizer]) -> None:
    """Raise CalibrationError naming the sites without legal qparams: none, NaN, inf, or a scale not above 0."""
    wrong = []
    for quantizer in quantizers:
        if quantizer.disabled_reason is None and not isinstance(quantizer, Dynamic):
            try:
                quantizer.qparams()
            except OnnxqError as error:
                wrong.append(error)
    if wrong:
        first, *others = wrong
        more = f"; and so {join_names([error.subject for error in others])}" if others else ""
        raise first.replace_text(first.subject, first.cause + more)


def copy_inputs(inputs: Inputs) -> Inputs:
    """A copy of a batch on the host, which its owner may then change."""
    return tree_map_only(Tensor, lambda value: value.detach().to("cpu", copy=True), inputs)


class LayerwiseCalibration(fx.Interpreter):
    """One pass over the calls of a graph, all batches at each call: quantizers observe outputs of quantized calls.

    The interpreter's values are lists: one value a batch. So a quantizer sees all batches before its readers run.
    Weights are calibrated before. weights, activations: whether they are quantized on the way. A site that shares its
    qparams with others keeps those of the float pass, since the others are not calibrated yet when it is reached.
    """

    def __init__(self, model: fx.GraphModule, *, weights: bool, activations: bool) -> None:
        super().__init__(model)
        self.activations = activations
        quantizers = quantizers_of(model)
        self.leaders = {q.leader for q in quantizers if isinstance(q, Follower)}
        self.inputs: list[Iterator[Any]] = []
        for quantizer in quantizers:
            quantizer.observing = False
            quantizer.enabled = weights and quantizer.role.is_weight

    def calibrate_batches(self, batches: Sequence[Inputs]) -> None:
        """Calibrate the activations of the graph on these batches."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        for batch in batches:
            values = bind_inputs(self.graph, batch)
            self.inputs.append(
                value.to(device) if isinstance(value, Tensor) else value for value in values
            )
        with use_eval_mode(self.module):
            self.run()

    def run_node(self, n: fx.Node) -> list[Any]:
        """The node's result for each batch; quantizers are calibrated first."""
        if n.op == "placeholder":
            # Placeholders run in the order of the values that `bind_inputs` gives; `*args` takes the rest.
            take = tuple if str(n.target).startswith("*") else next
            return [take(values) for values in self.inputs]
        arguments = [
            fx.map_arg((n.args, n.kwargs), lambda source, k=k: self.env[source][k])
            for k in range(len(self.inputs))
        ]
        if (module := find_module(self.module, n)) is not None:
            self._calibrate_module(module, arguments)
        return [getattr(self, n.op)(n.target, *values) for values in arguments]

    def _calibrate_module(self, module: nn.Module, arguments: list[Any]) -> None:
        """Calibrate a quantizer, or those inside a module that was not traced, on these arguments."""
        # A traced layer has its inputs' quantizers in front of it, as calls of their own.
        if isinstance(module, WeightQuantized) and "input_quantizers" not in module._modules:
            # Quantizers of such a layer were calibrated as calls before it.
            return
        inside = [
            q for q in quantizers_of(module) if not q.role.is_weight and q.disabled_reason is None
        ]
        fresh = [q for q in inside if not isinstance(q, Follower) and q not in self.leaders]
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
