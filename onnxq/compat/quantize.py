"""The functions and configurations of onnxruntime.quantization: its signatures, onnxq's results.

A script runs with `onnxq.compat` in the place of `onnxruntime.quantization`. Arguments are taken over, or warned about,
by the tables of options.py; docs/from-onnxruntime.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.compat.calibrate import add_ranges, read_cache, read_samples, write_cache
from onnxq.compat.options import (
    ARGUMENTS,
    CONVERTS,
    DYNAMIC_EXTRAS,
    PRESET,
    STATIC_EXTRAS,
    WHOLE_ARGUMENTS,
    WHOLE_EXTRAS,
    CallLists,
    Names,
    Overrides,
    UnaskedFlag,
    UnaskedMethod,
    UnaskedTypes,
    choose_observer,
    convert_options,
    name_value,
    warn_caller,
    warn_meaningless,
)
from onnxq.compat.quant_utils import QuantFormat, QuantType
from onnxq.compat.theirs import hand_on, import_theirs
from onnxq.errors import ConfigError
from onnxq.sites import Caution, JsonObject, Settings

if TYPE_CHECKING:
    import onnx

    from onnxq.backends import Target
    from onnxq.graph import ModelSource
    from onnxq.pipeline.finalize import Result
    from onnxq.plan import Plan

Extras = Settings | None
# Overrides of every call: its caller runs the file with ONNX Runtime, whatever it was made for.
_OF_ALL: Overrides = {"latency": False, "verify.optimized": True}
# Those that say nothing of the plan.
_OF_RUNS = {"external_data", "provider", *_OF_ALL}
_DYNAMIC = "ort-dynamic"
# The first one with native types of 4 and 16 bits.
_OPSET_OF_4_BITS = 21
# Operators that quantize_dynamic makes MatMuls of before it looks at lists.
_DYNAMIC_ALSO = {"MatMul": "Gemm"}
# Arguments of get_qdq_config's `calibrate_args`, as extra options.
_CALIBRATE_ARGS = {
    "symmetric": "CalibTensorRangeSymmetric",
    "moving_average": "CalibMovingAverage",
    "averaging_constant": "CalibMovingAverageConstant",
    "max_intermediate_outputs": "CalibMaxIntermediateOutputs",
    "percentile": "CalibPercentile",
}


def quantize_static(
    model_input: ModelSource,
    model_output: str | Path,
    calibration_data_reader: Any = None,
    quant_format: Any = QuantFormat.QDQ,
    op_types_to_quantize: Names = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: Names = None,
    nodes_to_exclude: Names = None,
    use_external_data_format: bool = False,
    calibrate_method: Any = UnaskedMethod.MinMax,
    calibration_providers: Names = None,
    extra_options: Extras = None,
    calibration_cache_path: str | Path | None = None,
) -> Result:
    """Quantize with samples, as `onnxq.quantize` does, and write the model over `model_output`.

    An argument at its default leaves the choice to onnxq. calibration_data_reader: anything with `get_next`, or any
    data of `onnxq.quantize`; read once, sample by sample. calibration_cache_path: is written, with onnxq's plan in it;
    where it is there already, its plan is carried out, or, of a cache that onnxruntime wrote, its ranges are taken.
    Warns once (CompatWarning) for each argument that means nothing here, and for alarms about the result.
    Raises ConfigError without samples and plan; else as `onnxq.quantize`.
    """
    arguments, extra = _keep_converted(locals()), dict(extra_options or {})
    preset, tensors = extra.get(PRESET), dict(extra.get("TensorQuantOverrides") or {})
    cache = None if calibration_cache_path is None else Path(calibration_cache_path)
    cached = read_cache(cache) if cache is not None and cache.exists() else {}
    if isinstance(cached, dict):
        add_ranges(tensors, cached, model_input)
    target = _find_target(preset) if preset or tensors else None
    whole = target is not None and target.whole
    overrides, cautions = convert_options(arguments, WHOLE_ARGUMENTS if whole else ARGUMENTS)
    extras = convert_options(extra, WHOLE_EXTRAS if whole else STATIC_EXTRAS)
    for more, further in (extras, choose_observer(calibrate_method, extra)):
        overrides |= more
        cautions += further
    if "target" in overrides and overrides.pop("emit", None):
        cautions.append(warn_meaningless("quant_format", WHOLE_ARGUMENTS["quant_format"].reason))
    from onnxq.compat.overrides import TensorOverrides

    named = None
    if target is not None and tensors:
        converts = extra.get(CONVERTS, True)
        named = TensorOverrides(tensors, target, name_value(activation_type), converts)
    selection = CallLists(op_types_to_quantize, nodes_to_quantize, nodes_to_exclude, named)
    samples = read_samples(calibration_data_reader, extra.get("CalibStridedMinMax"))
    request = (overrides, cautions, selection)
    if not isinstance(cached, dict):
        return _apply_plan(model_input, model_output, cached, samples, *request)
    if calibration_data_reader is None and not cached:
        cause = "is None, so that there are no samples to find ranges on"
        fix = "give a reader, or call quantize_dynamic"
        raise ConfigError("calibration_data_reader", cause, fix, code="Q319")
    result = _quantize(model_input, model_output, samples, preset, *request)
    if cache is not None and not cached:
        write_cache(result.plan, calibrate_method, cache)
    return result


# Helpers that quantize nothing are onnxruntime's own.
__getattr__ = hand_on("quantize")


def quantize_dynamic(
    model_input: ModelSource,
    model_output: str | Path,
    op_types_to_quantize: Names = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: Names = None,
    nodes_to_exclude: Names = None,
    use_external_data_format: bool = False,
    extra_options: Extras = None,
) -> Result:
    """Quantize without samples: weights now, activations when the model runs (preset `ort-dynamic`).

    See `quantize_static` for the arguments.
    """
    overrides, cautions = convert_options(_keep_converted(locals()), ARGUMENTS)
    more, further = convert_options(extra_options or {}, DYNAMIC_EXTRAS)
    ops = list(op_types_to_quantize or ())
    ops += [_DYNAMIC_ALSO[op] for op in ops if op in _DYNAMIC_ALSO]
    selection = CallLists(ops, nodes_to_quantize, nodes_to_exclude)
    return _quantize(
        model_input,
        model_output,
        None,
        _DYNAMIC,
        overrides | more,
        [*cautions, *further],
        selection,
    )


def _find_target(preset: str | None) -> Target:
    """The target of a preset or file of onnxq; None: the default."""
    # Here, so that an import of onnxq.compat loads no numpy and no engine.
    from onnxq.backends import find_target
    from onnxq.config import Command
    from onnxq.pipeline.configuration import make_config

    return find_target(make_config(preset, {}, Command.QUANTIZE).target)


def _keep_converted(arguments: Settings) -> dict[str, Any]:
    """The arguments of a call that the table converts."""
    return {name: value for name, value in arguments.items() if name in ARGUMENTS}


def _quantize(
    model: ModelSource,
    output: str | Path,
    data: Any,
    config: str | None,
    overrides: Overrides,
    cautions: Iterable[Caution],
    selection: CallLists,
) -> Result:
    from onnxq.backends import find_target, load_config
    from onnxq.commands.apply import apply
    from onnxq.commands.plan import make_plan
    from onnxq.commands.quantize import quantize as quantize_model
    from onnxq.compat.selection import describe_floats, read_selection

    wish = read_selection(model, selection)
    warn_caller([*cautions, *wish.cautions], depth=2)
    chosen = {**overrides, **_OF_ALL, **({"rules": list(wish.rules)} if wish.rules else {})}
    # Files of whole graphs run on their accelerator, which has no part in ONNX Runtime's sums.
    settings = load_config(config, target=overrides.get("target"))
    chosen["verify.optimized"] = not find_target(settings.target).whole
    if "skip" in chosen:
        # An override takes the place of the preset's own list, which holds as well.
        chosen["skip"] = [*settings.skip, *chosen["skip"]]
    if data is None and config != _DYNAMIC:
        # The ranges of a cache stand in the rules: the plan has them, and nothing is left to observe.
        plan = make_plan(
            model, None, config, overrides={key: chosen[key] for key in chosen.keys() - _OF_RUNS}
        )
        runs = {key: chosen[key] for key in chosen.keys() & _OF_RUNS}
        result = apply(model, plan, None, overrides=runs, out=output, force=True)
    else:
        # As in onnxruntime, an existing output is overwritten.
        result = quantize_model(model, data, config, overrides=chosen, out=output, force=True)
    warn_caller([*result.report.alarms(), *describe_floats(result, wish.named)], depth=2)
    return result


def _apply_plan(
    model: ModelSource,
    output: str | Path,
    plan: Plan,
    data: Any,
    overrides: Overrides,
    cautions: list[Caution],
    selection: CallLists,
) -> Result:
    """Carry out a plan, which says already all that arguments could."""
    from onnxq.commands.apply import apply

    allowed = {key: value for key, value in overrides.items() if key in _OF_RUNS}
    if allowed != overrides or selection != CallLists():
        reason = "the cache holds a plan, in which it stands what is quantized and how"
        cautions = [
            *cautions,
            warn_meaningless("all that says so beside calibration_cache_path", reason),
        ]
    warn_caller(cautions, depth=2)
    result = apply(model, plan, data, overrides=allowed | _OF_ALL, out=output, force=True)
    warn_caller(result.report.alarms(), depth=2)
    return result


@dataclass
class StaticQuantConfig:
    """Arguments of `quantize_static`, for `quantize`."""

    calibration_data_reader: Any
    calibrate_method: Any = UnaskedMethod.MinMax
    quant_format: Any = QuantFormat.QDQ
    activation_type: Any = QuantType.QInt8
    weight_type: Any = QuantType.QInt8
    op_types_to_quantize: Names = None
    nodes_to_quantize: Names = None
    nodes_to_exclude: Names = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False
    calibration_providers: Names = None
    extra_options: Extras = None


@dataclass
class DynamicQuantConfig:
    """Arguments of `quantize_dynamic`, for `quantize`."""

    weight_type: Any = QuantType.QInt8
    op_types_to_quantize: Names = None
    nodes_to_quantize: Names = None
    nodes_to_exclude: Names = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False
    extra_options: Extras = None


def quantize(model_input: ModelSource, model_output: str | Path, quant_config: object) -> Result:
    """Call the function that the configuration is for."""
    if isinstance(quant_config, StaticQuantConfig):
        return quantize_static(model_input, model_output, **vars(quant_config))
    if isinstance(quant_config, DynamicQuantConfig):
        return quantize_dynamic(model_input, model_output, **vars(quant_config))
    cause = f"is of type {type(quant_config).__name__}"
    fix = "give a StaticQuantConfig or DynamicQuantConfig of onnxq.compat; for weights alone, onnxq.quantize"
    raise ConfigError("quant_config", cause, fix, code="Q304")


def get_qdq_config(
    model_input: ModelSource,
    calibration_data_reader: Any,
    calibrate_method: Any = UnaskedMethod.MinMax,
    calibrate_args: Extras = None,
    activation_type: Any = QuantType.QUInt8,
    weight_type: Any = QuantType.QInt8,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    keep_removable_activations: bool = False,
    min_real_range: float | None = None,
    tensor_quant_overrides: Extras = None,
    calibration_providers: Names = None,
    op_types_to_quantize: Names = None,
    nodes_to_exclude: Names | Callable[[onnx.ModelProto, onnx.NodeProto], bool] = None,
    extra_options: Extras = None,
) -> StaticQuantConfig:
    """The arguments of `quantize_static` that mean the same, with the nodes that `nodes_to_exclude` picks by name.

    What onnxruntime fills in beside them, the types of operators and two extra options, is there to be read.
    """
    from onnxq.graph import load_model, walk_all_nodes

    model = load_model(model_input)
    nodes = list(walk_all_nodes(model.proto))
    if callable(nodes_to_exclude):
        excluded = [node.name for node in nodes if nodes_to_exclude(model.proto, node)]
    else:
        excluded = list(nodes_to_exclude or ())
    extra = {
        "ForceQuantizeNoInputCheck": UnaskedFlag(True),
        **_ask_contrib(model.proto, {activation_type, weight_type}, tensor_quant_overrides or {}),
        "MinimumRealRange": min_real_range,
        "QDQKeepRemovableActivations": keep_removable_activations,
        "ActivationSymmetric": activation_symmetric,
        "WeightSymmetric": weight_symmetric,
        "TensorQuantOverrides": dict(tensor_quant_overrides or {}),
        **{_CALIBRATE_ARGS.get(key, key): value for key, value in (calibrate_args or {}).items()},
        **(extra_options or {}),
    }
    # Whoever takes a type out of the list leaves its operators float.
    types = {node.op_type for node in nodes if node.name not in excluded}
    return StaticQuantConfig(
        calibration_data_reader,
        calibrate_method=calibrate_method,
        activation_type=activation_type,
        weight_type=weight_type,
        op_types_to_quantize=op_types_to_quantize or UnaskedTypes(sorted(types)),
        nodes_to_quantize=[],
        nodes_to_exclude=excluded,
        per_channel=per_channel,
        reduce_range=reduce_range,
        use_external_data_format=model.external,
        calibration_providers=calibration_providers,
        extra_options=extra,
    )


def _ask_contrib(model: onnx.ModelProto, types: set[Any], overrides: Settings) -> JsonObject:
    """The extra option that asks for operators of ONNX Runtime where the opset has none for 4 bits."""
    from onnxq.graph import find_opset

    helper = import_theirs("tensor_quant_overrides").TensorQuantOverridesHelper(overrides)
    widths = {str(kind).rpartition("Int")[2] for kind in types | helper.get_quant_types()}
    asks = find_opset(model) < _OPSET_OF_4_BITS and "4" in widths and "16" not in widths
    return {"UseQDQContribOps": UnaskedFlag(True)} if asks else {}
