"""quant_pre_process: onnxq folds, fuses and infers shapes by itself, so that there is nothing to do before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.compat.options import CompatOption, OptionTable, convert_options, warn_caller
from onnxq.compat.theirs import hand_on

if TYPE_CHECKING:
    import onnx

    from onnxq.graph import ModelSource

__getattr__ = hand_on("shape_inference")
# The first one without Upsample, in which Clip has its bounds as inputs.
_OPSET = 11
# Code of a model that ONNX's checker refuses.
_INVALID = "Q103"
_INFERS = "sizes are observed on samples when the model is quantized"
ONE_FILE = "weights beside the model go into one file, `MODEL_data`"
# At its default, those over 4 KB go there.
LEAST_BYTES = CompatOption(1024, lambda size: {"least": int(size)})
_OPTIONS: OptionTable = {
    "skip_optimization": CompatOption(False),
    "skip_onnx_shape": CompatOption(False),
    "skip_symbolic_shape": CompatOption(False),
    "auto_merge": CompatOption(False, reason=_INFERS),
    "int_max": CompatOption(2**31 - 1, reason=_INFERS),
    "guess_output_rank": CompatOption(False, reason=_INFERS),
    "verbose": CompatOption(0, reason="there is nothing to tell"),
    "all_tensors_to_one_file": CompatOption(False),
    "external_data_location": CompatOption(reason=ONE_FILE),
    "external_data_size_threshold": LEAST_BYTES,
}


def quant_pre_process(
    input_model: ModelSource | None = None,
    output_model_path: str | Path | None = None,
    skip_optimization: bool = False,
    skip_onnx_shape: bool = False,
    skip_symbolic_shape: bool = False,
    auto_merge: bool = False,
    int_max: int = 2**31 - 1,
    guess_output_rank: bool = False,
    verbose: int = 0,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
    **deprecated_kwargs: Any,
) -> None:
    """Write the model with a name for every node and the shapes that can be inferred.

    A model below opset 11 is raised to it: an Upsample becomes a Resize. The quantizing functions do the rest.
    Warns once (CompatWarning) for each argument that means nothing here.
    Raises ModelError for a model that cannot be read, ConfigError without one.
    """
    from onnxq.errors import ConfigError
    from onnxq.graph import ensure_opset, infer_shapes, name_nodes, save_model

    source = deprecated_kwargs.pop("input_model_path", None) if input_model is None else input_model
    if source is None or output_model_path is None:
        name = "input_model" if source is None else "output_model_path"
        raise ConfigError(name, "is not given", "give the path of a model", code="Q304")
    arguments = {name: value for name, value in locals().items() if name in _OPTIONS}
    saving, cautions = convert_options({**arguments, **deprecated_kwargs}, _OPTIONS)
    warn_caller(cautions)
    proto = ensure_opset(name_nodes(_load_repaired(source)), _OPSET)
    save_model(
        infer_shapes(proto),
        output_model_path,
        external=save_as_external_data or None,
        overwrite=True,
        **saving,
    )


def _load_repaired(source: ModelSource) -> onnx.ModelProto:
    """A model; one below opset 11 without operators that its opset does not have, as exporters of its time wrote."""
    import onnx
    from onnx import version_converter

    from onnxq.errors import ModelError
    from onnxq.graph import find_opset, load_model

    try:
        return load_model(source).proto
    except ModelError as error:
        proto = source if isinstance(source, onnx.ModelProto) else onnx.load(source)
        if (find_opset(proto) or _OPSET) >= _OPSET or error.code != _INVALID:
            raise
        copy = onnx.ModelProto.FromString(proto.SerializeToString())
        for node in copy.graph.node:
            # Opset 10 has a Resize with the same inputs in its place.
            node.op_type = "Resize" if node.op_type == "Upsample" else node.op_type
        return load_model(version_converter.convert_version(copy, _OPSET)).proto
