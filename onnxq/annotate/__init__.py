"""The Q/DQ pairs of a model of any tool: found, named by site, their bits read and written."""

from onnxq.annotate.bits import Inspection, Origin, PairInfo
from onnxq.annotate.existing import describe_quantized, find_existing, read_plan_note
from onnxq.annotate.operators import OperatorInfo, WeightSums, find_operators, find_saturating
from onnxq.annotate.read import find_pairs, inspect_model, read_model
from onnxq.annotate.write import BITS_ATTRIBUTE_WARNING, annotate_model, assign_bits, write_bits

__all__ = [
    "BITS_ATTRIBUTE_WARNING",
    "Inspection",
    "OperatorInfo",
    "Origin",
    "PairInfo",
    "WeightSums",
    "annotate_model",
    "assign_bits",
    "describe_quantized",
    "find_existing",
    "find_operators",
    "find_pairs",
    "find_saturating",
    "inspect_model",
    "read_model",
    "read_plan_note",
    "write_bits",
]
