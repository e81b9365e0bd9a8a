"""Values of a configuration that no kernel of ONNX Runtime supports."""

from __future__ import annotations

from onnxq.backends.registry import OBSERVER, Limit, has_positive_scales, is_dynamic
from onnxq.config.model import Config


def _has_operator_blocks(config: Config) -> bool:
    size = config.weights.block_size or 0
    return config.emit == "qdq" or (size >= 16 and not size & (size - 1))


def _can_have_signed_scales(config: Config) -> bool:
    blocks = config.mode == "weight-only" and config.weights.granularity == "block"
    return blocks or has_positive_scales(config)


def _can_be_dynamic(config: Config) -> bool:
    data = config.activations
    usual = data.bits == 8 and data.scheme == "asymmetric" and not data.is_signed and data.granularity == "tensor"
    return not is_dynamic(config) or (usual and data.storage in ("", "uint8"))


LIMITS = (
    Limit(
        "cpu",
        lambda c: c.cpu == "any" or c.mode in ("static", "dynamic", "auto"),
        "weights alone are placed without regard to time",
        "remove it, or write `mode: static`",
    ),
    Limit(
        "activations",
        _can_be_dynamic,
        "what is quantized at each run becomes 8-bit asymmetric uint8, with one scale for the tensor",
        "remove what it says of bits, scheme, signed and granularity, or write `mode: static`",
    ),
    Limit(
        "high_precision",
        lambda c: not is_dynamic(c) or c.high_precision in (None, "float32"),
        "ONNX quantizes nothing but float32 at each run",
        "remove it, or write `mode: static`",
    ),
    Limit(
        "placement",
        lambda c: not is_dynamic(c) or c.placement == "rules",
        "placements are timed for scales that stand in the file",
        "write `placement: rules`",
    ),
    Limit(
        "cpu",
        lambda c: c.cpu == "any" or c.placement == "rules",
        "a measured placement is made for the machine that measures it",
        "remove it, or write `placement: rules`",
    ),
    Limit(
        "emit",
        lambda c: c.emit == "qdq" or c.mode == "weight-only",
        "MatMulNBits computes on float data",
        "remove it, or write `mode: weight-only`",
    ),
    Limit(
        "emit",
        _has_operator_blocks,
        "MatMulNBits has blocks of 16, 32, 64, 128 … weights",
        "remove it, or write `weights: {granularity: block, block_size: 32}`",
    ),
    Limit(
        "accuracy_level",
        lambda c: c.accuracy_level == 0 or c.emit == "nbits",
        "pairs have none: a session's option sets it",
        "remove it, or write `emit: nbits`",
    ),
    Limit(
        OBSERVER,
        _can_have_signed_scales,
        "negative scales are for blocks in mode weight-only",
        "remove `signed_scales`",
    ),
    Limit(
        "attention",
        lambda c: c.attention == "float",
        "ONNX Runtime on the CPU is slower with attention in int8",
        "write `attention: float`",
    ),
)
