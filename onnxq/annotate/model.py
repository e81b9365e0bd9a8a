"""What annotate finds and writes: quantize/dequantize pairs and their bits, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onnx import ModelProto

from onnxq.annotate.operators import OperatorInfo
from onnxq.annotate.saturation import WeightSums
from onnxq.sites import Caution, Role, Site
from onnxq.spec import ElementType, Granularity, find_element_type


class Origin(str, Enum):
    """Where the number of bits was read; the order is the order of trust."""

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
    """One quantized site as the file shows it.

    quantize, dequantize, clip: node names, "" where the pair has none (a stored integer weight has no quantize).
    ops: the operators that read the dequantized tensor; for a model output, the one that makes it.
    storage: the integer (or float8) type of the file. bits: how many of it are meant.
    scales: how many there are, 0 when they are computed at run time; scale_min, scale_max are nan then.
    levels: lowest and highest level that a constant uses; None for anything else.
    """

    site: Site
    role: Role
    scope: str = ""
    quantize: str = ""
    dequantize: str = ""
    clip: str = ""
    ops: tuple[str, ...] = ()
    bits: int
    origin: Origin
    storage: str
    symmetric: bool
    granularity: Granularity
    scales: int
    scale_min: float
    scale_max: float
    levels: tuple[int, int] | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The pair's nodes that there are, in the order in which they run."""
        return tuple(name for name in (self.clip, self.quantize, self.dequantize) if name)

    @property
    def element_type(self) -> ElementType:
        """The width and the sign of the storage type."""
        return find_element_type(self.storage)

    @property
    def scheme(self) -> str:
        """symmetric or asymmetric."""
        return "symmetric" if self.symmetric else "asymmetric"


@dataclass(frozen=True, eq=False)
class Inspection:
    """A model's pairs, and the model with every node named (and annotated, when that was asked for).

    source: its path, "" in memory. output: the file written. warnings: what a person must know.
    operators: nodes that compute on integers themselves, without pairs.
    weights: int8 weights that 8-bit data meets, with what can overflow; () where that was not looked for.
    """

    model: ModelProto
    pairs: tuple[PairInfo, ...]
    source: str = ""
    output: str = ""
    warnings: tuple[Caution, ...] = ()
    operators: tuple[OperatorInfo, ...] = ()
    weights: tuple[WeightSums, ...] = ()
