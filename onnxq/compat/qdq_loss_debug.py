"""Weights and activations of a quantized model beside the float ones, under the names of onnxruntime.quantization.

`modify_model_output_intermediate_tensors`, `collect_activations` and the errors are onnxruntime's own, handed on; what
belongs together is found by the names of onnxq's pairs too, and by the structure of the file. `onnxq.diff` with
`layers` does all of it at once.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from onnxq.arrays import Array
from onnxq.compat.theirs import hand_on
from onnxq.graph import GraphIndex
from onnxq.graph.integer_products import dequantize_node
from onnxq.passes.base import RunContext
from onnxq.pipeline.both_models import load_both
from onnxq.plan.names import PARTS
from onnxq.sites import TensorId

__getattr__ = hand_on("qdq_loss_debug")
QUANT_INPUT_SUFFIX = "_QuantizeLinear_Input"
# Ends of the names of values in front of a pair, whose result has the tensor's own name, and of those behind one.
_BEFORE = (QUANT_INPUT_SUFFIX, PARTS["float"])
_BEHIND = ("_DequantizeLinear_Output", "_DequantizeLinear_Output_1", PARTS["dequantized"])
Values = Sequence[Array]


def create_activation_matching(
    qdq_activations: Mapping[str, Values], float_activations: Mapping[str, Values] | None = None
) -> dict[str, dict[str, Values]]:
    """By tensor with a pair: its values in front of it, behind it, and in the float model, of `collect_activations`."""
    matching = {}
    for name, values in qdq_activations.items():
        for ends, own, other in (
            (_BEFORE, "pre_qdq", "post_qdq"),
            (_BEHIND, "post_qdq", "pre_qdq"),
        ):
            for end in ends:
                base = name.removesuffix(end)
                if base != name and base in qdq_activations:
                    matching[base] = {own: values, other: qdq_activations[base]}
    floats = float_activations or {}
    for name, entry in matching.items():
        if name in floats:
            entry["float"] = floats[name]
    return matching


def create_weight_matching(
    float_model_path: str | Path, qdq_model_path: str | Path
) -> dict[str, dict[str, Array]]:
    """By weight and bias that both models have: its values, and those that its DequantizeLinear makes.

    The float values are those of the model as it was quantized: its channels scaled against each other where they were.
    """
    state, made = load_both(str(float_model_path), RunContext(), str(qdq_model_path))
    plain = GraphIndex(state.model)
    quantized = GraphIndex(made)
    matching: dict[str, dict[str, Array]] = {}
    for node in quantized.nodes:
        values = dequantize_node(quantized, node)
        if values is None:
            continue
        # After the endings of onnxruntime's stored integers and of onnxq's, then as its readers
        # call it in the float model.
        names = [node.inputs[0].removesuffix(end) for end in ("_quantized", PARTS["quantized"])]
        for edge in quantized.list_consumers(node.result):
            if edge.node in plain.named:
                names += plain.named[edge.node].inputs[edge.index : edge.index + 1]
        for name in names:
            weight = plain.find_constant(TensorId(name, node.scope))
            if weight is not None and weight.size == values.size:
                matching.setdefault(
                    name, {"float": np.asarray(weight), "dequantized": values.reshape(weight.shape)}
                )
    return matching


def compute_activation_error(
    activations_match: Mapping[str, Mapping[str, Values]],
    err_func: Callable[[Values, Values], float] | None = None,
) -> dict[str, dict[str, float]]:
    """By tensor the error of its pair alone, and of its values behind it against the float model, where that has it."""
    measure = err_func or __getattr__("compute_signal_to_quantization_noice_ratio")
    errors = {}
    for name, match in activations_match.items():
        errors[name] = {"qdq_err": measure(match["pre_qdq"], match["post_qdq"])}
        if "float" in match:
            errors[name]["xmodel_err"] = measure(match["float"], match["post_qdq"])
    return errors
