"""A calibrated plan carried out: the only writer of QuantizeLinear and DequantizeLinear. It decides nothing."""

from onnxq.emit.model import (
    BITS_KEY,
    PLAN_KEY,
    emit_pairs,
    emit_types,
    leave_out_notes,
    replace_biases,
    unpack_plan,
    write_matrices,
)

__all__ = [
    "BITS_KEY",
    "PLAN_KEY",
    "emit_pairs",
    "emit_types",
    "leave_out_notes",
    "replace_biases",
    "unpack_plan",
    "write_matrices",
]
