"""What an engine's target can take at all, checked when a configuration is read: file and line are known here.

The target's own tables (onnxq/targets) decide node by node; this only refuses what no node could take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from onnxq.config.model import Config
from onnxq.config.rules import QuantWish
from onnxq.errors import ConfigError, Location
from onnxq.spec import FLOAT8

# Observers that weigh evenly spaced levels against each other; those of FP8 are not.
_RANGE_ONLY = ("minmax", "moving_average", "percentile")


@dataclass(frozen=True)
class Limit:
    """A field and what it may hold. why: what the engine does otherwise. fix: what to write instead."""

    path: str
    takes: Callable[[Config], bool]
    why: str
    fix: str


def _int8_or_float8(wish: QuantWish) -> bool:
    return wish.storage in ("", "int8", FLOAT8) and wish.bits <= 8


def _weights_stored(config: Config) -> bool:
    if config.mode == "weight-only":
        return config.weights.storage in ("", "int8", "int4") and config.weights.bits <= 8
    return _int8_or_float8(config.weights)


def _blocks(config: Config) -> bool:
    blocked = config.weights.granularity == "block"
    return not blocked or (config.mode == "weight-only" and config.weights.storage == "int4")


def _one_kind(config: Config) -> bool:
    return not _static(config) or (config.weights.storage == FLOAT8) == (config.activations.storage == FLOAT8)


def _static(config: Config) -> bool:
    return config.mode == "static"


_SYMMETRIC = "TensorRT takes no zero point: it refuses asymmetric int8"
_NO_CPU = "only the placement for ONNX Runtime goes by the kind of CPU"
_SIGNED = "TensorRT reads uint8 as int8 and clips it at 127: wrong answers, silently"

TENSORRT: tuple[Limit, ...] = (
    Limit("activations.scheme", lambda c: not _static(c) or c.activations.scheme == "symmetric", _SYMMETRIC,
          "write `scheme: symmetric`, or start from `extends: trt-int8`"),
    Limit("weights.scheme", lambda c: c.weights.scheme == "symmetric", _SYMMETRIC,
          "write `scheme: symmetric`, or start from `extends: trt-int8`"),
    Limit("activations.signed", lambda c: not _static(c) or c.activations.is_signed, _SIGNED,
          "remove it, or write `signed: true`"),
    Limit("weights.signed", lambda c: c.weights.is_signed, _SIGNED, "remove it, or write `signed: true`"),
    Limit("activations.granularity", lambda c: not _static(c) or c.activations.granularity == "tensor",
          "a convolution whose input has a scale per channel runs in float", "write `granularity: tensor`"),
    Limit("activations.storage", lambda c: not _static(c) or _int8_or_float8(c.activations),
          "TensorRT quantizes activations to int8 or FP8", f"write `bits: 8`, and `storage: {FLOAT8}` for FP8"),
    Limit("weights.storage", _weights_stored,
          "TensorRT takes int8 or FP8 weights, and int4 ones when only weights are quantized",
          "write `bits: 8`, or `mode: weight-only` with `storage: int4` (see trt-int4-weights)"),
    Limit("weights.granularity", _blocks, "TensorRT reads blocks only of int4 weights in weight-only mode",
          "write `granularity: channel`, or see trt-int4-weights"),
    Limit("weights.storage", _one_kind,
          "TensorRT multiplies FP8 by FP8 and int8 by int8, nothing else",
          f"write `storage: {FLOAT8}` for both activations and weights, or for neither"),
    Limit("bias", lambda c: c.bias == "float", "TensorRT refuses a DequantizeLinear of int32", "write `bias: float`"),
    Limit("placement", lambda c: c.placement == "rules", "placements are timed in ONNX Runtime, which says nothing of "
          "TensorRT", "write `placement: rules`"),
    Limit("cpu", lambda c: c.cpu == "any", _NO_CPU, "remove it, or write `target: ort`"),
)  # fmt: skip
ONNXRUNTIME: tuple[Limit, ...] = (
    Limit("cpu", lambda c: c.cpu == "any" or c.mode == "static", "weights alone are placed without regard to time",
          "remove it, or write `mode: static`"),
    Limit("cpu", lambda c: c.cpu == "any" or c.placement == "rules",
          "a measured placement is made for the machine that measures it", "remove it, or write `placement: rules`"),
    Limit("attention", lambda c: c.attention == "float", "ONNX Runtime on the CPU is slower with attention in int8",
          "write `attention: float`"),
)  # fmt: skip
VIRTUAL: tuple[Limit, ...] = (
    Limit("placement", lambda c: c.placement == "rules", "placements are timed in ONNX Runtime, and this target is no "
          "engine", "write `placement: rules`"),
    Limit("cpu", lambda c: c.cpu == "any", _NO_CPU, "remove it, or write `target: ort`"),
)  # fmt: skip
LIMITS: Mapping[str, tuple[Limit, ...]] = {"ort": ONNXRUNTIME, "trt": TENSORRT, "virtual": VIRTUAL}


def check_limits(config: Config) -> Config:
    """The configuration itself. ConfigError naming file, line and path of what its target cannot take."""
    for limit in LIMITS.get(config.target, ()):
        if not limit.takes(config):
            raise ConfigError(_where(config, limit.path), limit.why, limit.fix, code="Q307")
    for path, cause, fix in (*_rule_faults(config), *_observer_faults(config)):
        raise ConfigError(_where(config, path), cause, fix, code="Q307")
    return config


def _where(config: Config, path: str) -> Location:
    """`file:line: path` of the field; of what holds it, or of the target that asks for it, where it was not written."""
    parent = path.rpartition(".")[0]
    for written in (path, parent, "target"):
        found = config.where(written)
        if written and str(found) != written:
            return replace(found, within=f"{found.within.removesuffix(written)}{path}")
    return Location("") / path


def _rule_faults(config: Config) -> Iterator[tuple[str, str, str]]:
    if config.target != "trt":
        return
    for k, rule in enumerate(config.rules):
        path = f"rules[{k}].set"
        if rule.set.scheme == "asymmetric":
            yield f"{path}.scheme", _SYMMETRIC, "write `scheme: symmetric`, or `float: true` to leave the tensor alone"
        if rule.set.signed is False or (rule.set.storage or "").startswith("u"):
            field = "signed" if rule.set.signed is False else "storage"
            yield f"{path}.{field}", _SIGNED, "ask for a signed type, or `float: true` to leave the tensor alone"
        if rule.set.bits == 16 or rule.set.storage == "int16":
            field = "bits" if rule.set.bits == 16 else "storage"
            yield f"{path}.{field}", "TensorRT has no 16-bit integers", "write `float: true` to leave the tensor alone"


def _observer_faults(config: Config) -> Iterator[tuple[str, str, str]]:
    wish = config.activations
    if wish.storage == FLOAT8 and wish.observer.name not in _RANGE_ONLY:
        cause = f"{wish.observer.name!r} weighs evenly spaced levels, and those of FP8 are not"
        yield "activations.observer", cause, f"use one of {', '.join(_RANGE_ONLY)}"
