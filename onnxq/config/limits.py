"""Limits of a target, checked when a configuration is read, because file and line are known then.

The tables in onnxq/backends decide node by node; here only values are refused that no node supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from onnxq.config.model import Config
from onnxq.config.rules import TensorConfig
from onnxq.errors import ConfigError, Location
from onnxq.spec import FLOAT8, STORAGE_BITS

# Observers that need no evenly spaced values, and FP8 values are not evenly spaced.
_RANGE_ONLY = ("minmax", "moving_average", "percentile")


@dataclass(frozen=True)
class Limit:
    """The allowed values of one field."""

    # Dotted path.
    path: str
    takes: Callable[[Config], bool]
    # What the engine does with other values.
    why: str
    fix: str


def _is_int8_or_float8(tensor: TensorConfig) -> bool:
    return tensor.storage in ("", "int8", FLOAT8) and tensor.bits <= 8


def _can_store_weights(config: Config) -> bool:
    if config.mode == "weight-only":
        return config.weights.storage in ("", "int8", "int4") and config.weights.bits <= 8
    return _is_int8_or_float8(config.weights)


def _can_read_blocks(config: Config) -> bool:
    if config.weights.granularity != "block":
        return True
    return config.mode == "weight-only" and config.weights.storage == "int4"


def _has_one_kind(config: Config) -> bool:
    return not _is_static(config) or (config.weights.storage == FLOAT8) == (config.activations.storage == FLOAT8)


def _has_operator_blocks(config: Config) -> bool:
    size = config.weights.block_size or 0
    return config.emit == "qdq" or (size >= 16 and not size & (size - 1))


def _has_positive_scales(config: Config) -> bool:
    return not dict(config.weights.observer.options).get("signed_scales", False)


def _can_have_signed_scales(config: Config) -> bool:
    blocks = config.mode == "weight-only" and config.weights.granularity == "block"
    return blocks or _has_positive_scales(config)


def _is_static(config: Config) -> bool:
    return config.mode in ("static", "auto")


def _is_dynamic(config: Config) -> bool:
    return config.mode in ("dynamic", "auto")


def _can_be_dynamic(config: Config) -> bool:
    made = config.activations
    usual = made.bits == 8 and made.scheme == "asymmetric" and not made.is_signed and made.granularity == "tensor"
    return not _is_dynamic(config) or (usual and made.storage in ("", "uint8"))


_OBSERVER = "weights.observer"
_SYMMETRIC = "TensorRT takes no zero point: it refuses asymmetric int8"
_NO_CPU = "only the placement for ONNX Runtime goes by the kind of CPU"
_NO_OPERATORS = "only ONNX Runtime has the operator MatMulNBits"
_SIGNED = "TensorRT reads uint8 as int8 and clips it at 127: wrong answers, silently"

TENSORRT: tuple[Limit, ...] = (
    Limit("mode", lambda c: not _is_dynamic(c), "TensorRT reads scales that stand in the file, and none of each run",
          "write `mode: static` and give samples, or `target: ort`"),
    Limit("activations.scheme", lambda c: not _is_static(c) or c.activations.scheme == "symmetric", _SYMMETRIC,
          "write `scheme: symmetric`, or start from `extends: trt-int8`"),
    Limit("weights.scheme", lambda c: c.weights.scheme == "symmetric", _SYMMETRIC,
          "write `scheme: symmetric`, or start from `extends: trt-int8`"),
    Limit("activations.signed", lambda c: not _is_static(c) or c.activations.is_signed, _SIGNED,
          "remove it, or write `signed: true`"),
    Limit("weights.signed", lambda c: c.weights.is_signed, _SIGNED, "remove it, or write `signed: true`"),
    Limit("activations.granularity", lambda c: not _is_static(c) or c.activations.granularity == "tensor",
          "a convolution whose input has a scale per channel runs in float", "write `granularity: tensor`"),
    Limit("activations.storage", lambda c: not _is_static(c) or _is_int8_or_float8(c.activations),
          "TensorRT quantizes activations to int8 or FP8", f"write `bits: 8`, and `storage: {FLOAT8}` for FP8"),
    Limit("weights.storage", _can_store_weights,
          "TensorRT takes int8 or FP8 weights, and int4 ones when only weights are quantized",
          "write `bits: 8`, or `mode: weight-only` with `storage: int4` (see trt-int4-weights)"),
    Limit("weights.granularity", _can_read_blocks, "TensorRT reads blocks only of int4 weights in weight-only mode",
          "write `granularity: channel`, or see trt-int4-weights"),
    Limit("weights.storage", _has_one_kind,
          "TensorRT multiplies FP8 by FP8 and int8 by int8, nothing else",
          f"write `storage: {FLOAT8}` for both activations and weights, or for neither"),
    Limit("bias", lambda c: c.bias == "float", "TensorRT refuses a DequantizeLinear of int32", "write `bias: float`"),
    Limit(_OBSERVER, _has_positive_scales, "TensorRT reads positive scales", "remove `signed_scales`"),
    Limit("cpu", lambda c: c.cpu == "any", _NO_CPU, "remove it, or write `target: ort`"),
    Limit("emit", lambda c: c.emit == "qdq", _NO_OPERATORS, "remove it, or write `target: ort`"),
)  # fmt: skip
ONNXRUNTIME: tuple[Limit, ...] = (
    Limit("cpu", lambda c: c.cpu == "any" or c.mode in ("static", "dynamic", "auto"),
          "weights alone are placed without regard to time", "remove it, or write `mode: static`"),
    Limit("activations", _can_be_dynamic,
          "what is quantized at each run becomes 8-bit asymmetric uint8, with one scale for the tensor",
          "remove what it says of bits, scheme, signed and granularity, or write `mode: static`"),
    Limit("high_precision", lambda c: not _is_dynamic(c) or c.high_precision in (None, "float32"),
          "ONNX quantizes nothing but float32 at each run", "remove it, or write `mode: static`"),
    Limit("placement", lambda c: not _is_dynamic(c) or c.placement == "rules",
          "placements are timed for scales that stand in the file", "write `placement: rules`"),
    Limit("cpu", lambda c: c.cpu == "any" or c.placement == "rules",
          "a measured placement is made for the machine that measures it", "remove it, or write `placement: rules`"),
    Limit("emit", lambda c: c.emit == "qdq" or c.mode == "weight-only", "MatMulNBits computes on float data",
          "remove it, or write `mode: weight-only`"),
    Limit("emit", _has_operator_blocks, "MatMulNBits has blocks of 16, 32, 64, 128 … weights",
          "remove it, or write `weights: {granularity: block, block_size: 32}`"),
    Limit("accuracy_level", lambda c: c.accuracy_level == 0 or c.emit == "nbits",
          "pairs have none: a session's option sets it", "remove it, or write `emit: nbits`"),
    Limit(_OBSERVER, _can_have_signed_scales, "negative scales are for blocks in mode weight-only",
          "remove `signed_scales`"),
    Limit("attention", lambda c: c.attention == "float", "ONNX Runtime on the CPU is slower with attention in int8",
          "write `attention: float`"),
)  # fmt: skip
VIRTUAL: tuple[Limit, ...] = (
    Limit("mode", lambda c: not _is_dynamic(c), "this target computes plans with scales, and at no run",
          "write `mode: static` and give samples, or `target: ort`"),
    Limit(_OBSERVER, _has_positive_scales, "this target stands for engines with positive scales",
          "remove `signed_scales`"),
    Limit("placement", lambda c: c.placement == "rules", "placements are timed in an engine, and this target is none",
          "write `placement: rules`"),
    Limit("cpu", lambda c: c.cpu == "any", _NO_CPU, "remove it, or write `target: ort`"),
    Limit("emit", lambda c: c.emit == "qdq", _NO_OPERATORS, "remove it, or write `target: ort`"),
)  # fmt: skip
LIMITS: Mapping[str, tuple[Limit, ...]] = {"ort": ONNXRUNTIME, "trt": TENSORRT, "virtual": VIRTUAL}


def check_limits(config: Config) -> Config:
    """Return the configuration. Raises ConfigError with file, line and path of a value its target does not support."""
    for limit in LIMITS.get(config.target, ()):
        if not limit.takes(config):
            raise ConfigError(_locate_field(config, limit.path), limit.why, limit.fix, code="Q307")
    for path, cause, fix in (*_find_rule_faults(config), *_find_observer_faults(config)):
        raise ConfigError(_locate_field(config, path), cause, fix, code="Q307")
    return config


def _locate_field(config: Config, path: str) -> Location:
    """`file:line: path` of the field. The line is that of its section, or of `target`, if the field was not written."""
    section = path.rpartition(".")[0]
    places = (config.find_place(written) for written in (path, section, "target"))
    return next((place for place in places if place is not None), Location("")) / path


def _find_rule_faults(config: Config) -> Iterator[tuple[str, str, str]]:
    for k, rule in enumerate(config.rules):
        # The first rule that matches wins, so that nothing but the section stands below it.
        ruled = config.model_copy(update={"weights": config.weights.model_copy(update=rule.set.given())})
        for limit in LIMITS.get(config.target, ()):
            if limit.path == _OBSERVER and rule.set.observer is not None and not limit.takes(ruled):
                yield f"rules[{k}].set.observer", limit.why, limit.fix
    if config.target != "trt":
        return
    for k, rule in enumerate(config.rules):
        path = f"rules[{k}].set"
        if rule.set.scheme == "asymmetric":
            yield f"{path}.scheme", _SYMMETRIC, "write `scheme: symmetric`, or `float: true` to leave the tensor alone"
        if rule.set.signed is False or (rule.set.storage and not STORAGE_BITS[rule.set.storage][1]):
            field = "signed" if rule.set.signed is False else "storage"
            yield f"{path}.{field}", _SIGNED, "ask for a signed type, or `float: true` to leave the tensor alone"
        if rule.set.bits == 16 or rule.set.storage == "int16":
            field = "bits" if rule.set.bits == 16 else "storage"
            yield f"{path}.{field}", "TensorRT has no 16-bit integers", "write `float: true` to leave the tensor alone"


def _find_observer_faults(config: Config) -> Iterator[tuple[str, str, str]]:
    activations = config.activations
    if activations.storage == FLOAT8 and activations.observer.name not in _RANGE_ONLY:
        cause = f"{activations.observer.name!r} weighs evenly spaced levels, and those of FP8 are not"
        yield "activations.observer", cause, f"use one of {', '.join(_RANGE_ONLY)}"
