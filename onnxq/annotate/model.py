"""Quantize/dequantize pairs of a model and their bits, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onnx import ModelProto

from onnxq.annotate.operators import OperatorInfo
from onnxq.annotate.saturation import WeightSums
from onnxq.plan import PrecisionPlan
from onnxq.sites import Caution, Role, Site
from onnxq.spec import ElementType, Granularity, find_element_type
from onnxq.wording import abbreviate


class Origin(str, Enum):
    """The sign that a number of bits was read from, in the order of trust."""

    GIVEN = "given"
    PLAN = "plan"
    METADATA = "metadata"
    ATTRIBUTE = "attribute"
    TYPE = "type"
    CLIP = "clip"
    VALUES = "values"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class PairInfo:
    """One quantized site as the file shows it."""

    site: Site
    role: Role
    scope: str = ""
    # Names of the pair's nodes; "" for one that it lacks, as a stored integer weight has no quantize node.
    quantize: str = ""
    dequantize: str = ""
    clip: str = ""
    # The node that gathers rows of a table, which `dequantize` then dequantizes; "" for other pairs.
    lookup: str = ""
    # Operators that read the dequantized tensor; for a model output, the one that makes it.
    ops: tuple[str, ...] = ()
    # Bits that are meant, of those that the type has.
    bits: int
    origin: Origin
    # Scale and zero point are computed at each run.
    dynamic: bool = False
    # ONNX type of the quantized values, in lower case.
    storage: str
    symmetric: bool
    granularity: Granularity
    # Number of scales, 0 where they are computed at run time; their smallest and largest are NaN then.
    scales: int
    scale_min: float
    scale_max: float
    # Lowest and highest quantized value of a constant; None for other tensors.
    levels: tuple[int, int] | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the pair's nodes, in the order in which they run."""
        return tuple(name for name in (self.clip, self.quantize, self.dequantize) if name)

    @property
    def element_type(self) -> ElementType:
        """The width and the sign of the storage type."""
        return find_element_type(self.storage)

    @property
    def scheme(self) -> str:
        """The scheme in the words of the configuration."""
        return "symmetric" if self.symmetric else "asymmetric"


@dataclass(frozen=True, eq=False)
class Inspection:
    """The pairs of a model, and the model with every node named (and annotated, when that was asked for)."""

    __repr__ = abbreviate

    model: ModelProto
    pairs: tuple[PairInfo, ...]
    # Path of the file that was read, "" for a model in memory; path of the file that was written, "" without one.
    source: str = ""
    output: str = ""
    warnings: tuple[Caution, ...] = ()
    # Nodes that compute on integers themselves, without pairs.
    operators: tuple[OperatorInfo, ...] = ()
    # As the plan in the model's metadata says; None without one.
    float_types: PrecisionPlan | None = None
    # int8 weights of nodes with 8-bit data, with the sums that can overflow; () where that was not looked for.
    weights: tuple[WeightSums, ...] = ()
