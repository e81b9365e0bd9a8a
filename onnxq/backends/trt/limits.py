"""Values of a configuration that no kernel of TensorRT supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxq.backends.registry import (
    NO_CPU_KINDS,
    NO_OPERATORS,
    OBSERVER,
    Limit,
    RuleLimit,
    has_positive_scales,
    is_dynamic,
    is_static,
)
from onnxq.spec import FLOAT8, STORAGE_BITS

if TYPE_CHECKING:
    from onnxq.config.model import Config
    from onnxq.config.rules import RuleSet, TensorConfig

_NO_ZERO_POINT = "TensorRT takes no zero point: it refuses asymmetric int8"
_SIGNED = "TensorRT reads uint8 as int8 and clips it at 127: wrong answers, silently"
_SIGNED_FIX = "remove it, or write `signed: true`"
_SYMMETRIC_FIX = "write `scheme: symmetric`, or start from `extends: trt-int8`"


def _is_int8_or_float8(tensor: TensorConfig) -> bool:
    # Without a storage it is an integer type of the width.
    return tensor.storage in ("", "int8", FLOAT8) and tensor.bits <= 8


def _can_store_weights(config: Config) -> bool:
    if config.mode == "weight-only":
        return config.weights.storage in ("", "int8", "int4") and config.weights.bits <= 8
    return _is_int8_or_float8(config.weights)


def _can_read_blocks(config: Config) -> bool:
    if config.weights.granularity != "block":
        return True
    return config.mode == "weight-only" and config.weights.storage == "int4"


LIMITS = (
    Limit(
        "mode",
        lambda c: not is_dynamic(c),
        "TensorRT reads scales that stand in the file, and none of each run",
        "write `mode: static` and give samples, or `target: ort`",
    ),
    Limit(
        "activations.scheme",
        lambda c: not is_static(c) or c.activations.scheme == "symmetric",
        _NO_ZERO_POINT,
        _SYMMETRIC_FIX,
    ),
    Limit(
        "weights.scheme", lambda c: c.weights.scheme == "symmetric", _NO_ZERO_POINT, _SYMMETRIC_FIX
    ),
    Limit(
        "activations.signed",
        lambda c: not is_static(c) or c.activations.is_signed,
        _SIGNED,
        _SIGNED_FIX,
    ),
    Limit("weights.signed", lambda c: c.weights.is_signed, _SIGNED, _SIGNED_FIX),
    Limit(
        "activations.granularity",
        lambda c: not is_static(c) or c.activations.granularity == "tensor",
        "a convolution whose input has a scale per channel runs in float",
        "write `granularity: tensor`",
    ),
    Limit(
        "activations.storage",
        lambda c: not is_static(c) or _is_int8_or_float8(c.activations),
        "TensorRT quantizes activations to int8 or FP8",
        f"write `bits: 8`, and `storage: {FLOAT8}` for FP8",
    ),
    Limit(
        "weights.storage",
        _can_store_weights,
        "TensorRT takes int8 or FP8 weights, and int4 ones when only weights are quantized",
        "write `bits: 8`, or `mode: weight-only` with `storage: int4` (see trt-int4-weights)",
    ),
    Limit(
        "weights.granularity",
        _can_read_blocks,
        "TensorRT reads blocks only of int4 weights in weight-only mode",
        "write `granularity: channel`, or see trt-int4-weights",
    ),
    Limit(
        "weights.storage",
        lambda c: (
            not is_static(c) or (c.weights.storage == FLOAT8) == (c.activations.storage == FLOAT8)
        ),
        "TensorRT multiplies FP8 by FP8 and int8 by int8, nothing else",
        f"write `storage: {FLOAT8}` for both activations and weights, or for neither",
    ),
    Limit(
        "bias",
        lambda c: c.bias == "float",
        "TensorRT refuses a DequantizeLinear of int32",
        "write `bias: float`",
    ),
    Limit(
        OBSERVER, has_positive_scales, "TensorRT reads positive scales", "remove `signed_scales`"
    ),
    NO_CPU_KINDS,
    NO_OPERATORS,
)


def _find_unsigned(rule: RuleSet) -> str:
    # None says nothing of the sign.
    if rule.signed is False:
        return "signed"
    return "storage" if rule.storage and not STORAGE_BITS[rule.storage][1] else ""


def _find_wide(rule: RuleSet) -> str:
    if rule.bits == 16:
        return "bits"
    return "storage" if rule.storage == "int16" else ""


RULE_LIMITS = (
    RuleLimit(
        lambda rule: "scheme" if rule.scheme == "asymmetric" else "",
        _NO_ZERO_POINT,
        "write `scheme: symmetric`, or `float: true` to leave the tensor alone",
    ),
    RuleLimit(
        _find_unsigned, _SIGNED, "ask for a signed type, or `float: true` to leave the tensor alone"
    ),
    RuleLimit(
        _find_wide,
        "TensorRT has no 16-bit integers",
        "write `float: true` to leave the tensor alone",
    ),
)
