"""The recipe for Qualcomm's NPU, by the names that onnxruntime.quantization.execution_providers.qnn gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.compat.options import (
    CONVERTS,
    PRESET,
    CompatOption,
    OptionTable,
    UnaskedMethod,
    convert_options,
    warn_caller,
)
from onnxq.compat.quant_utils import QuantType
from onnxq.compat.quantize import StaticQuantConfig, get_qdq_config
from onnxq.compat.shape_inference import LEAST_BYTES, ONE_FILE
from onnxq.compat.theirs import hand_on, import_theirs

if TYPE_CHECKING:
    from onnxq.compat.options import Names
    from onnxq.graph import ModelSource

__getattr__ = hand_on("execution_providers.qnn")
# Every tensor in one width, that of the arguments.
_PRESET = "qnn-int8"
_PREPROCESSING: OptionTable = {
    # Initializers that are listed as inputs are plain ones in any case. Quantizing fuses operators.
    "exclude_initializer_from_input": CompatOption(False),
    "fuse_layernorm": CompatOption(False),
    "all_tensors_to_one_file": CompatOption(False),
    "external_data_location": CompatOption(reason=ONE_FILE),
    "external_data_size_threshold": LEAST_BYTES,
    "external_data_convert_attribute": CompatOption(False, reason=ONE_FILE),
}


def get_qnn_qdq_config(
    model_input: ModelSource,
    calibration_data_reader: Any,
    calibrate_method: Any = UnaskedMethod.MinMax,
    activation_type: Any = QuantType.QUInt8,
    weight_type: Any = QuantType.QUInt8,
    per_channel: bool = False,
    init_overrides: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    add_qtype_converts: bool = True,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    keep_removable_activations: bool = False,
    stride: int | None = None,
    calibration_providers: Names = None,
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
    model_input: ModelSource,
    model_output: str | Path,
    exclude_initializer_from_input: bool = False,
    fuse_layernorm: bool = False,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
    external_data_convert_attribute: bool = False,
    inputs_to_make_channel_last: Names = None,
    outputs_to_make_channel_last: Names = None,
    dynamic_input_shapes: Sequence[tuple[str, str]] | None = None,
) -> bool:
    """Write the model with a name for every node and the shapes that are given or can be inferred; True.

    Quantizing fuses and rewrites by itself. Warns once (CompatWarning) for each argument that means nothing here.
    Raises ValueError for inputs and outputs whose channels cannot come last.
    """
    from onnxq.graph import fix_sizes, infer_shapes, load_model, name_nodes, save_model

    arguments = {name: value for name, value in locals().items() if name in _PREPROCESSING}
    saving, cautions = convert_options(arguments, _PREPROCESSING)
    warn_caller(cautions)
    sizes = {name: tuple(map(int, shape.split(","))) for name, shape in dynamic_input_shapes or ()}
    proto = name_nodes(load_model(model_input).proto)
    proto = infer_shapes(fix_sizes(proto, sizes) if sizes else proto)
    if inputs_to_make_channel_last or outputs_to_make_channel_last:
        theirs = import_theirs("execution_providers.qnn.preprocess")
        theirs.update_io_to_channel_last(
            proto, inputs_to_make_channel_last, outputs_to_make_channel_last
        )
        import_theirs("onnx_model").ONNXModel(proto).topological_sort()
    save_model(
        proto, model_output, external=save_as_external_data or None, overwrite=True, **saving
    )
    return True
