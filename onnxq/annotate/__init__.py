"""The Q/DQ pairs of a model of any tool: found, named by site, their bits read and written."""

from onnxq.annotate.annotate import BITS_ATTRIBUTE_WARNING, annotate_model, strip_notes
from onnxq.annotate.bits import Inspection, Origin, PairInfo
from onnxq.annotate.check import check_notes
from onnxq.annotate.existing import describe_quantized, find_existing, read_plan_note
from onnxq.annotate.operators import OperatorInfo, WeightSums, find_operators, find_saturating
from onnxq.annotate.read import find_pairs, inspect_model, read_model
from onnxq.annotate.sidecar import read_sidecar, write_sidecar
from onnxq.annotate.write import write_bits

__all__ = [
    "BITS_ATTRIBUTE_WARNING",
    "Inspection",
    "OperatorInfo",
    "Origin",
    "PairInfo",
    "WeightSums",
    "annotate_model",
    "check_notes",
    "describe_quantized",
    "find_existing",
    "find_operators",
    "find_pairs",
    "find_saturating",
    "inspect_model",
    "read_model",
    "read_plan_note",
    "read_sidecar",
    "strip_notes",
    "write_bits",
    "write_sidecar",
]
