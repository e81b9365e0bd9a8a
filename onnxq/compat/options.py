"""Arguments and extra options of onnxruntime.quantization as overrides of our configuration: tables, one row each.

A value that is the other tool's default leaves the choice to onnxq. Any other is taken over, or means nothing here,
which one warning says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from onnxq import backends
from onnxq.errors import escape_line, suggest_names
from onnxq.sites import Caution, Settings
from onnxq.spec import FLOAT8

if TYPE_CHECKING:
    from onnxq.compat.overrides import TensorOverrides

# Of operators, nodes or providers; None: all, or the usual ones.
Names = Sequence[str] | None
Overrides = dict[str, Any]
# Of the values of an argument, by their names there.
Meanings = Mapping[str, Overrides]


class CompatWarning(UserWarning):
    """An argument that means nothing here, or an alarm about the result; `code` stands in `onnxq.codes`."""

    def __init__(self, caution: Caution) -> None:
        super().__init__(escape_line(f"{caution} [{caution.code}]"))
        self.code = caution.code


class Unasked:
    """A value that reads as onnxruntime's own, and that no caller asked for: the choice is onnxq's."""


class UnaskedFlag(Unasked, int):
    """True or false, in the extra options of a configuration."""


class UnaskedTypes(Unasked, list[str]):
    """The types of a model's operators. A type that a caller takes out stays float; the others are not forced."""


class UnaskedMethod(Unasked, Enum):
    """The default of `calibrate_method`: equal to theirs."""

    MinMax = 0

    def __eq__(self, other: object) -> bool:
        return bool(name_value(other) == self.name)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class CallLists:
    """The lists of a call that say what to quantize; None or empty: everything."""

    op_types: Names = None
    nodes: Names = None
    excluded: Names = None
    tensors: TensorOverrides | None = None


@dataclass(frozen=True)
class CompatOption:
    """One argument or extra option.

    default: its value there, at which the choice is ours. convert: the overrides that mean another value.
    reason: why other values mean nothing here; "" where they are taken over.
    """

    default: Any = None
    convert: Callable[[Any], Overrides] = lambda _: {}
    reason: str = ""


OptionTable = Mapping[str, CompatOption]


def _look_up_type(tensors: str, table: Meanings) -> Callable[[str], Overrides]:
    """By the name of a type. tensors: the section of the configuration that it is for."""

    def find(value: str) -> Overrides:
        if value != "QFLOAT8E4M3FN":
            return table.get(value, {})
        # The rest stays float32, as there: scales in float16, the target's own choice, vanish in ONNX Runtime's
        # optimizations.
        return {
            "target": backends.find_holder(FLOAT8).name,
            "high_precision": "float32",
            f"{tensors}.storage": FLOAT8,
        }

    return find


_SYMMETRIC: Overrides = {"activations.scheme": "symmetric", "activations.signed": True}
_WEIGHT_SCHEMES: Mapping[bool, Overrides] = {
    True: {"weights.scheme": "symmetric", "weights.signed": True},
    False: {"weights.scheme": "asymmetric"},
}
_ACTIVATIONS: Meanings = {
    # The unsigned type is ours: kernels drop a Relu in front of a pair only where 0 is the lowest level.
    "QUInt8": {},
    "QInt16": {"activations.bits": 16, "activations.signed": True},
    "QUInt16": {"activations.bits": 16},
    "QInt4": {"activations.bits": 4, "activations.signed": True},
    "QUInt4": {"activations.bits": 4},
}
_WEIGHTS: Meanings = {
    "QUInt8": {"weights.scheme": "asymmetric", "weights.signed": False},
    "QInt16": {"weights.bits": 16},
    "QUInt16": {"weights.bits": 16, "weights.scheme": "asymmetric", "weights.signed": False},
    "QInt4": {"weights.bits": 4, "weights.storage": "int4", "weights.narrow_range": True},
    "QUInt4": {"weights.bits": 4, "weights.scheme": "asymmetric", "weights.signed": False},
}
# As on the NPU, whose kernels read no other sign and scheme: with the zero point moved, the steps are the same.
_WHOLE_ACTIVATIONS: Meanings = {
    **{kind: {"activations.bits": 16} for kind in ("QInt16", "QUInt16")},
    **{kind: {"activations.bits": 4} for kind in ("QInt4", "QUInt4")},
}
_WHOLE_WEIGHTS: Meanings = {
    **{kind: {"weights.bits": 16} for kind in ("QInt16", "QUInt16")},
    **{kind: {"weights.bits": 4, "weights.storage": "int4"} for kind in ("QInt4", "QUInt4")},
}
# Extra options that the other tool does not have.
PRESET = "onnxq.config"
CONVERTS = "onnxq.add_qtype_converts"
PLACED = "pairs are placed where a kernel of the engine reads them; a pair elsewhere costs time and gives nothing"
_RUN_TIME = (
    "activations get their scale at run time, from an operator that writes uint8 with a zero point"
)
_NPU = "it is for accelerators that onnxq has no target for"
_KERNELS = "kernels of this target read activations with a zero point, and weights without one"

ARGUMENTS: OptionTable = {
    "quant_format": CompatOption("QDQ", lambda _: {"emit": "qoperator"}),
    # Weights have one scale per output channel in any case: it costs no time.
    "per_channel": CompatOption(False),
    # Sums of 16 bits cannot overflow then, with 8 bits kept.
    "reduce_range": CompatOption(False, lambda _: {"saturation": "avoid"}),
    "activation_type": CompatOption("QInt8", _look_up_type("activations", _ACTIVATIONS)),
    "weight_type": CompatOption("QInt8", _look_up_type("weights", _WEIGHTS)),
    "use_external_data_format": CompatOption(False, lambda value: {"external_data": bool(value)}),
    # The first; operators that it does not have run on the CPU.
    "calibration_providers": CompatOption(
        None, lambda names: {"provider": str(names[0])} if names else {}
    ),
}
DYNAMIC_EXTRAS: OptionTable = {
    "extra.Sigmoid.nnapi": CompatOption(False, reason=_NPU),
    "ActivationSymmetric": CompatOption(False, reason=_RUN_TIME),
    "ActivationRestrictedAsymmetric": CompatOption(False, reason=_NPU),
    "WeightSymmetric": CompatOption(None, lambda value: _WEIGHT_SCHEMES.get(value, {})),
    # Bodies of If are quantized in any case; those of Loop and Scan are in the report, as left float.
    "EnableSubgraph": CompatOption(False),
    "ForceQuantizeNoInputCheck": CompatOption(False, reason=PLACED),
    # Products of two activations stay float in any case.
    "MatMulConstBOnly": CompatOption(),
    "DefaultTensorType": CompatOption(reason="types that the model does not declare are inferred"),
}
STATIC_EXTRAS: OptionTable = {
    **DYNAMIC_EXTRAS,
    "ActivationSymmetric": CompatOption(False, lambda _: _SYMMETRIC),
    "CalibTensorRangeSymmetric": CompatOption(False, lambda _: _SYMMETRIC),
    "AddQDQPairToWeight": CompatOption(
        False, reason="weights are stored as integers, which every engine reads"
    ),
    "OpTypesToExcludeOutputQuantization": CompatOption(
        [],
        reason="a pair stands behind an operator only where its kernel needs one; MatMul writes float",
    ),
    "DedicatedQDQPair": CompatOption(
        False, reason="engines read one pair for all readers of a tensor"
    ),
    "QDQOpTypePerChannelSupportToAxis": CompatOption(
        {},
        reason="weights have their scales along output channels, the only axis that kernels take",
    ),
    # Read with the samples, by choose_observer, and by OverriddenGraph.
    "CalibStridedMinMax": CompatOption(),
    "CalibMovingAverage": CompatOption(),
    "CalibMovingAverageConstant": CompatOption(),
    "CalibPercentile": CompatOption(),
    "TensorQuantOverrides": CompatOption(),
    "CalibMaxIntermediateOutputs": CompatOption(
        reason="no values are kept from one sample to the next"
    ),
    # Tried at the default effort, and kept where the outputs are better for it.
    "SmoothQuant": CompatOption(False),
    "SmoothQuantAlpha": CompatOption(
        0.5, reason="alpha is chosen, layer by layer, by the error of the layer's output"
    ),
    "SmoothQuantFolding": CompatOption(
        True, reason="a factor goes into the operator in front wherever it can"
    ),
    "UseQDQContribOps": CompatOption(
        False, reason="types newer than the model's opset raise its opset"
    ),
    "MinimumRealRange": CompatOption(
        convert=lambda width: {
            f"{kind}.min_range": float(width) for kind in ("activations", "weights")
        }
    ),
    # Relu and Clip stay in the file in any case.
    "QDQKeepRemovableActivations": CompatOption(False),
    "QDQDisableWeightAdjustForInt32Bias": CompatOption(
        False, reason="a weight's scale is raised only where its bias would overflow int32 without"
    ),
    "QuantizeBias": CompatOption(True, lambda _: {"bias": "float"}),
    "BlockSize": CompatOption(
        0, lambda size: {"weights.granularity": "block", "weights.block_size": int(size)}
    ),
    # Of onnxq: the preset or file to begin with, and what the recipe for the NPU does to neighbours of an override.
    PRESET: CompatOption(),
    CONVERTS: CompatOption(True),
}
# Those of targets that take whole graphs.
WHOLE_ARGUMENTS: OptionTable = {
    **ARGUMENTS,
    "quant_format": CompatOption("QDQ", reason="the engines of this target read pairs"),
    "activation_type": CompatOption("QInt8", _look_up_type("activations", _WHOLE_ACTIVATIONS)),
    "weight_type": CompatOption("QInt8", _look_up_type("weights", _WHOLE_WEIGHTS)),
}
WHOLE_EXTRAS: OptionTable = {
    **STATIC_EXTRAS,
    "ActivationSymmetric": CompatOption(False, reason=_KERNELS),
    "CalibTensorRangeSymmetric": CompatOption(False, reason=_KERNELS),
    "WeightSymmetric": CompatOption(True, reason=_KERNELS),
}


def warn_meaningless(name: str, reason: str) -> Caution:
    """The warning about an argument."""
    return Caution("W130", f"{name} means nothing here: {reason}")


def warn_caller(cautions: Iterable[Caution], depth: int = 1) -> None:
    """Warn where a public function was called. depth: functions from that one to the one that calls this."""
    for caution in cautions:
        warnings.warn(CompatWarning(caution), stacklevel=depth + 2)


def name_value(value: Any) -> Any:
    """The name of an enum's member, of whichever package it is; any other value itself."""
    return getattr(value, "name", value)


def convert_options(arguments: Settings, table: OptionTable) -> tuple[Overrides, list[Caution]]:
    """Overrides for our configuration, and a warning for each argument that means nothing here.

    arguments: by name; table: of all names there are.
    """
    overrides: Overrides = {}
    cautions = []
    for name, raw in arguments.items():
        value = name_value(raw)
        option = table.get(name)
        if option is None:
            cautions.append(
                warn_meaningless(name, f"no option is called so; {suggest_names(name, table)}")
            )
        elif value is None or value == option.default or isinstance(raw, Unasked):
            continue
        elif option.reason:
            cautions.append(warn_meaningless(name, option.reason))
        else:
            overrides |= option.convert(value)
    return overrides, cautions


def choose_observer(method: Any, extra: Settings) -> tuple[Overrides, list[Caution]]:
    """The observer of activations for a calibration method and its options, and warnings.

    Ranges that a caller asks for are not chosen anew by the error that they cause; a mean is where that choice begins.
    """
    name = name_value(method)
    if name == "Distribution":
        return {}, [
            warn_meaningless(
                "calibrate_method=Distribution", "float8 values get the range that was seen"
            )
        ]
    averages = name == "MinMax" and extra.get("CalibMovingAverage")
    if isinstance(method, Unasked) and not averages:
        return {}, []
    observer: Overrides = {"name": "moving_average" if averages else str(name).lower()}
    if name == "Percentile" and extra.get("CalibPercentile") is not None:
        observer["percentile"] = float(extra["CalibPercentile"])
    cautions = []
    if averages and extra.get("CalibMovingAverageConstant", 0.01) != 0.01:
        reason = "the average is the mean over samples, which does not depend on their order"
        cautions.append(warn_meaningless("CalibMovingAverageConstant", reason))
    return {"activations.observer": observer} | ({} if averages else {"skip": ["ranges"]}), cautions
