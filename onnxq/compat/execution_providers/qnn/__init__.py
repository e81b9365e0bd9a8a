"""The recipe for Qualcomm's NPU, by the names that onnxruntime.quantization.execution_providers.qnn gives it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.compat.calibrate import CalibrationMethod
from onnxq.compat.options import CONVERTS, PRESET, CompatOption, CompatWarning, convert_options
from onnxq.compat.quant_utils import QuantType
from onnxq.compat.quantize import StaticQuantConfig, get_qdq_config
from onnxq.compat.shape_inference import ONE_FILE
from onnxq.compat.theirs import hand_on
from onnxq.errors import ConfigError

if TYPE_CHECKING:
    import onnx

    from onnxq.compat.quantize import Model, Names

__getattr__ = hand_on("execution_providers.qnn")


class LayoutError(ConfigError, ValueError):
    """An input or output that cannot have its channels last; a ValueError, as onnxruntime raises one."""


# Every tensor in one width, that of the arguments.
_PRESET = "qnn-int8"
_PREPROCESSING: Mapping[str, CompatOption] = {
    # Initializers that are listed as inputs are plain ones in any case. Quantizing fuses operators.
    "exclude_initializer_from_input": CompatOption(False),
    "fuse_layernorm": CompatOption(False),
    "all_tensors_to_one_file": CompatOption(False),
    "external_data_location": CompatOption(reason=ONE_FILE),
    "external_data_size_threshold": CompatOption(1024, reason=ONE_FILE),
    "external_data_convert_attribute": CompatOption(False, reason=ONE_FILE),
}


def get_qnn_qdq_config(
    model_input: Model,
    calibration_data_reader: Any,
    calibrate_method: Any = CalibrationMethod.MinMax,
    activation_type: Any = QuantType.QUInt8,
    weight_type: Any = QuantType.QUInt8,
    per_channel: bool = False,
    init_overrides: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    add_qtype_converts: bool = True,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    keep_removable_activations: bool = False,
    stride: int | None = None,
    calibration_providers: Sequence[str] | None = None,
    op_types_to_quantize: Names = None,
    nodes_to_exclude: Names = None,
) -> StaticQuantConfig:
    """The arguments of `quantize_static` for the NPU. What it needs beside them, the target's rules know."""
    return get_qdq_config(
        model_input,
        calibration_data_reader,
        calibrate_method=calibrate_method,
        activation_type=activation_type,
        weight_type=weight_type,
        activation_symmetric=activation_symmetric,
        weight_symmetric=weight_symmetric,
        per_channel=per_channel,
        keep_removable_activations=keep_removable_activations,
        tensor_quant_overrides=dict(init_overrides or {}),
        calibration_providers=calibration_providers,
        op_types_to_quantize=op_types_to_quantize,
        nodes_to_exclude=nodes_to_exclude,
        extra_options={PRESET: _PRESET, CONVERTS: add_qtype_converts, "CalibStridedMinMax": stride},
    )


def qnn_preprocess_model(
    model_input: Model,
    model_output: str | Path,
    exclude_initializer_from_input: bool = False,
    fuse_layernorm: bool = False,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
    external_data_convert_attribute: bool = False,
    inputs_to_make_channel_last: Sequence[str] | None = None,
    outputs_to_make_channel_last: Sequence[str] | None = None,
    dynamic_input_shapes: Sequence[tuple[str, str]] | None = None,
) -> bool:
    """Write the model with a name for every node and the shapes that are given or can be inferred; True.

    Quantizing fuses and rewrites by itself. Warns once (CompatWarning) for each argument that means nothing here.
    Raises LayoutError for inputs and outputs of another rank than channels can come last in.
    """
    from onnxq.graph import fix_sizes, infer_shapes, load_model, name_nodes, save_model

    arguments = {name: value for name, value in locals().items() if name in _PREPROCESSING}
    for caution in convert_options(arguments, _PREPROCESSING)[1]:
        warnings.warn(CompatWarning(caution), stacklevel=2)
    sizes = {name: tuple(map(int, shape.split(","))) for name, shape in dynamic_input_shapes or ()}
    proto = name_nodes(load_model(model_input).proto)
    proto = infer_shapes(fix_sizes(proto, sizes) if sizes else proto)
    proto = _move_channels(proto, inputs_to_make_channel_last or (), outputs_to_make_channel_last or ())
    save_model(proto, model_output, external=save_as_external_data or None, overwrite=True)
    return True


def _move_channels(proto: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """A copy whose inputs and outputs of these names have their channels last, by a Transpose at each; or the model."""
    from onnxq.graph import Editor
    from onnxq.graph.light import copy_proto
    from onnxq.sites import TensorId

    if not inputs and not outputs:
        return proto
    editor, named = Editor(proto), {*inputs, *outputs}
    for values, names, behind in ((proto.graph.input, inputs, True), (proto.graph.output, outputs, False)):
        for value in (value for value in values if value.name in names):
            name, rank = value.name, len(value.type.tensor_type.shape.dim)
            if rank < 3:
                fix = "leave it out of inputs_to_make_channel_last and outputs_to_make_channel_last"
                raise LayoutError(name, f"has rank {rank}, and needs to be of rank >= 3 for channels", fix, code="Q304")
            inner, made = editor.fresh(f"{name}/channels_first"), editor.fresh(f"{name}/Transpose")
            if behind:
                perm = [0, rank - 1, *range(1, rank - 1)]
                editor.insert_node("", "Transpose", [name], [inner], name=made, attrs={"perm": perm})
                editor.rewire(TensorId(name), inner)
            else:
                perm = [0, *range(2, rank), 1]
                editor.rename_tensor(TensorId(name), inner)
                editor.insert_node("", "Transpose", [inner], [name], name=made, attrs={"perm": perm})
    done = copy_proto(editor.export())
    for value in (*done.graph.input, *done.graph.output):
        if value.name in named:
            dims = list(value.type.tensor_type.shape.dim)
            del value.type.tensor_type.shape.dim[:]
            value.type.tensor_type.shape.dim.extend([dims[0], *dims[2:], dims[1]])
    return done
