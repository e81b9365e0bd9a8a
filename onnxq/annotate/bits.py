"""The number of bits of a pair, read from the most trustworthy sign that the file has.

In this order: metadata of onnxq, the attribute `bits`, a type that leaves no choice (int4, int2, float8, int32), the
bounds of a Clip, the quantized values of a stored weight, the width of the container.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from onnx import ModelProto, NodeProto

from onnxq.annotate.find import LOOKUP, Chain, is_dynamic, read_row_scale
from onnxq.annotate.operators import OperatorInfo, SaturatingWeights
from onnxq.arrays import Array, Integers, Interval, are_finite, as_float32, as_float64, as_int64
from onnxq.config.schema import JsonText
from onnxq.emit import BITS_KEY, PLAN_KEY, unpack_plan
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, MaybeNode, ModelLike, NodeRef
from onnxq.graph.scopes import map_entries, walk_nodes
from onnxq.graph.values import name_type
from onnxq.numerics import quantize
from onnxq.plan import Plan, PrecisionPlan, SitePlan, SitePlans
from onnxq.plan.names import is_clipped_part, name_part
from onnxq.sites import Caution, Cautions, MaybeTensor, Names, Role, Site
from onnxq.spec import (
    ElementType,
    Granularity,
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    find_element_type,
)
from onnxq.wording import Word, show_as_summary

# Fields of a quantized tensor in the metadata of a model, and those of all by the name of a node.
Record = Mapping[str, Any]
Records = Mapping[str, Record]
# The lowest and the highest integer.
Levels = tuple[int, int]


class Origin(Word):
    """The sign that a number of bits was read from, in the order of trust."""

    GIVEN = "given"
    # Notes of an earlier file, found again by the name of a node, by that of the tensor, or by what the tensor is made
    # of and what becomes of it.
    NAME = "by name"
    TENSOR = "by tensor"
    STRUCTURE = "by structure"
    PLAN = "plan"
    METADATA = "metadata"
    ATTRIBUTE = "attribute"
    TYPE = "type"
    CLIP = "clip"
    VALUES = "values"


# Bits, and the sign that they were read from.
OriginBits = tuple[int, Origin]


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
    ops: Names = ()
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
    levels: Levels | None = None

    @property
    def name(self) -> str:
        """Its site as messages and reports call it."""
        return str(self.site)

    @property
    def nodes(self) -> Names:
        """Names of the pair's nodes, in the order in which they run."""
        return tuple(filter(None, (self.clip, self.quantize, self.dequantize)))

    @property
    def element_type(self) -> ElementType:
        """The width and the sign of the storage type."""
        return find_element_type(self.storage)

    @property
    def scheme(self) -> str:
        """The scheme in the words of the configuration."""
        return "symmetric" if self.symmetric else "asymmetric"

    @property
    def scale_range(self) -> tuple[float, ...]:
        """The least and the greatest scale; () where the model computes them itself."""
        return () if math.isnan(self.scale_min) else (self.scale_min, self.scale_max)


PairInfos = tuple[PairInfo, ...]


@dataclass(frozen=True)
class Disagreement:
    """A note of bits that does not say what the file does."""

    # Of the pair; the name of the node for one that is gone.
    site: str
    # Where the note stands, and its number.
    noted: str
    # In the file, in its place.
    found: str
    why: str


@show_as_summary
@dataclass(frozen=True, eq=False)
class Inspection:
    """The pairs of a model, and the model with every node named (and annotated, when that was asked for)."""

    model: ModelProto
    pairs: PairInfos
    # Path of the file that was read, "" for a model in memory; path of the file that was written, "" without one.
    source: str = ""
    output: str = ""
    warnings: Cautions = ()
    # Nodes that compute on integers themselves, without pairs.
    operators: tuple[OperatorInfo, ...] = ()
    # As the plan in the model's metadata says; None without one.
    float_types: PrecisionPlan | None = None
    # int8 weights of nodes with 8-bit data, with the sums that can overflow; () where that was not looked for.
    weights: SaturatingWeights = ()
    # () where the notes were not compared.
    disagreements: tuple[Disagreement, ...] = ()


# Values: fewer say nothing about the width that was meant.
ENOUGH_VALUES = 16
# Types that narrower bits are stored in.
_CONTAINERS = ("int8", "uint8", "int16", "uint16")
# Distance of a bound from a whole quantized value, relative to it: float16 bounds carry 11 bits.
_LEVEL_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Numbers:
    """Scale and zero point of a chain; None where computed at run time. storage: e.g. "int8", "" when unknown."""

    scale: Array | None
    zero_point: Integers | None
    storage: str
    granularity: Granularity

    @property
    def element_type(self) -> ElementType:
        """The width and the sign of the type."""
        return find_element_type(self.storage)

    @property
    def qparams(self) -> QParams | None:
        """The same in the types of a plan, zeros where the pair has no zero point; None where computed at run time."""
        if self.scale is None:
            return None
        zero = np.zeros(self.scale.shape) if self.zero_point is None else self.zero_point
        return QParams(as_float32(self.scale), zero.astype(np.int32))

    @property
    def spec(self) -> QuantSpec:
        """All levels of the type. The scheme does not matter: the zero point is given."""
        return QuantSpec(
            bits=self.element_type.bits,
            signed=self.element_type.signed,
            symmetric=False,
            granularity=self.granularity,
            storage=self.storage,
        )


def read_numbers(index: GraphIndex, chain: Chain) -> Numbers:
    """The scale, zero point, type and granularity of a chain."""
    # Readers see the numbers of the dequantize node.
    node = chain.dequantize or chain.last
    # Of rows of a table; the other kinds say it themselves.
    grain: Granularity = PerChannel(0)
    storage = _find_type_name(index, chain.source)
    if chain.lookup is None:
        scale = index.input_value(node, 1)
        zero = index.input_value(node, 2)
        storage = _find_storage(index, chain)
        grain = _find_granularity(index, node, scale)
    elif node.op_type == LOOKUP:
        # GatherBlockQuantized reads data, indices, scales and zero points; the defaults are its own.
        scale = index.input_value(node, 2)
        zero = index.input_value(node, 3)
        grain = PerBlock(node.read_int("quantize_axis", 1), node.read_int("block_size", 128))
    else:
        scale = read_row_scale(index, node)
        zero = None
    return Numbers(
        scale=None if scale is None else as_float64(scale),
        # int4 and narrower come as ml_dtypes, which cast to int64 but do not compare with it.
        zero_point=None if zero is None else as_int64(zero),
        storage=storage,
        granularity=grain,
    )


def read_bits(
    index: GraphIndex,
    chain: Chain,
    qparams: Numbers,
    *,
    noted: OriginBits | None,
    levels: Levels | None,
) -> OriginBits:
    """The bits of a chain, and the sign they were read from.

    noted: bits of onnxq's own notes, None without any. levels: as `find_used_levels` returns them.
    """
    width = qparams.element_type.bits
    # A note wider than the type cannot be right.
    if noted is not None and noted[0] <= width:
        return noted
    written = [
        node.attrs["bits"] for node in chain.nodes if isinstance(node.attrs.get("bits"), int)
    ]
    if written and 1 <= written[0] <= width:
        return int(written[0]), Origin.ATTRIBUTE
    if qparams.storage not in _CONTAINERS:
        return width, Origin.TYPE
    clipped = read_clip_bits(index, chain, qparams)
    if clipped is not None and clipped < width:
        return clipped, Origin.CLIP
    if levels is not None and _count_values(index, chain) >= ENOUGH_VALUES:
        used = count_bits(*levels, signed=qparams.element_type.signed)
        if used < width:
            return used, Origin.VALUES
    return width, Origin.TYPE


def read_clip_bits(index: GraphIndex, chain: Chain, qparams: Numbers) -> int | None:
    """Bits that a Clip enforces, on the integers (QCDQ) or on the floats in front; None without one."""
    levels = read_clip_levels(index, chain, qparams)
    return None if levels is None else max(2, math.ceil(math.log2(levels[1] - levels[0] + 1)))


def read_clip_levels(index: GraphIndex, chain: Chain, qparams: Numbers) -> Levels | None:
    """Lowest and highest quantized value that a Clip lets through, on the integers or on the floats in front."""
    bounds = _read_bounds(index, chain.inner) if chain.inner_op == "Clip" else None
    if bounds is not None:
        return round(bounds[0]), round(bounds[1])
    return _float_clip_levels(index, chain, qparams)


def is_quantizer_clip(index: GraphIndex, chain: Chain, qparams: Numbers) -> bool:
    """True when the float Clip in front belongs to the quantizer: its bounds are the range of a narrower width.

    A ReLU6 in front of a quantize node fills the container and belongs to the network. In front of a scale of each run
    the name alone tells which one it is.
    """
    if chain.outer is not None and is_dynamic(chain.quantize):
        return is_clipped_part(chain.outer.outputs[0])
    return _float_clip_levels(index, chain, qparams) is not None


def _float_clip_levels(index: GraphIndex, chain: Chain, qparams: Numbers) -> Levels | None:
    """The levels that the Clip in front of a chain leaves; None for one that fills the container, and without one."""
    bounds = _read_bounds(index, chain.outer)
    if bounds is None or qparams.scale is None or qparams.scale.size != 1:
        return None
    scale = qparams.scale.item()
    if not scale > 0:
        return None
    zero = 0 if qparams.zero_point is None else int(qparams.zero_point.flat[0])
    ends = [bound / scale + zero for bound in bounds]
    if not all(
        math.isfinite(x) and abs(x - round(x)) <= _LEVEL_TOLERANCE * max(16, abs(x)) for x in ends
    ):
        return None
    low, high = map(round, ends)
    width = qparams.element_type.bits
    signed = qparams.element_type.signed
    # The full width without narrow range needs no Clip: the container saturates there.
    for bits in range(2, width + 1):
        bottom, top = _find_ends(bits, signed)
        narrow = signed and low == bottom + 1
        if high == top and (low == bottom or narrow) and (bits < width or narrow):
            return low, high
    return None


def find_used_levels(index: GraphIndex, chain: Chain, qparams: Numbers) -> Levels | None:
    """Lowest and highest quantized value of a constant; None for other tensors, FP8, and constants of zeros only."""
    value = None if qparams.element_type.is_float else index.find_constant(chain.source)
    if value is None:
        return None
    codes = as_int64(value) if chain.quantize is None else _quantize_constant(value, qparams)
    return (int(codes.min()), int(codes.max())) if codes is not None and codes.any() else None


def _count_values(index: GraphIndex, chain: Chain) -> int:
    shape = index.find_shape(chain.source)
    return 0 if shape is None else math.prod(dim for dim in shape if isinstance(dim, int))


def count_bits(low: int, high: int, *, signed: bool) -> int:
    """Bits of the narrowest type, from 2 on, that holds both quantized values."""
    ends = ((bits, *_find_ends(bits, signed)) for bits in range(2, 64))
    return next((bits for bits, bottom, top in ends if bottom <= low and high <= top), 64)


def _find_ends(bits: int, signed: bool) -> tuple[int, int]:
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def _quantize_constant(value: Array, chain_qparams: Numbers) -> Integers | None:
    """The quantized values of a float constant in front of a quantize node; None where they cannot be computed."""
    qparams = chain_qparams.qparams
    if qparams is None or not (qparams.scale > 0).all() or not are_finite(value):
        return None
    return as_int64(quantize(value, qparams, chain_qparams.spec))


def _read_bounds(index: GraphIndex, clip: MaybeNode) -> Interval | None:
    """Both ends of a Clip that has both; None for another, and without one."""
    if clip is None:
        return None
    low, high = index.read_clip(clip) or (0.0, math.inf)
    return (low, high) if -math.inf < low < high < math.inf else None


def _find_storage(index: GraphIndex, chain: Chain) -> str:
    """The type of the zero point, else of the stored tensor, else the one that the quantize node writes by default."""
    # Bytes are computed with, and the 4 bits in front of the Cast are meant.
    if chain.inner_op == "Cast":
        return _find_type_name(index, chain.source)
    for node in (chain.dequantize, chain.quantize):
        zero_type = _find_type_name(index, index.find_input(node, 2))
        if zero_type:
            return zero_type
    if chain.quantize is None:
        return _find_type_name(index, chain.source) or "uint8"
    dtype = chain.quantize.read_int("output_dtype", 0)
    return name_type(dtype) if dtype else "uint8"


def _find_type_name(index: GraphIndex, tensor: MaybeTensor) -> str:
    dtype = index.find_dtype(tensor)
    return name_type(dtype) if dtype else ""


def _find_granularity(index: GraphIndex, node: NodeRef, scale: Array | None) -> Granularity:
    shape = index.input_shape(node, 1) if scale is None else scale.shape
    # Defaults of ONNX: no blocks, axis 1. A scale of one element is one for the tensor, whatever its shape.
    block = node.read_int("block_size", 0)
    axis = node.read_int("axis", 1)
    if block > 0:
        return PerBlock(axis, block)
    return PerChannel(axis) if shape and len(shape) == 1 and shape[0] != 1 else PerTensor()


def read_noted_bits(record: Record | None) -> int | None:
    """The `bits` of a metadata record; None unless it is a whole number from 1 to 64."""
    text = str((record or {}).get("bits", ""))
    return int(text) if text.isdecimal() and len(text) <= 2 and 1 <= int(text) <= 64 else None


# In front of the keys of node metadata.
T = TypeVar("T")
NODE_PREFIX = "onnxq."


@dataclass(frozen=True, eq=False)
class Notes:
    """The notes of a model, by the names of nodes."""

    # Records of the model's `onnxq.bits` metadata.
    by_node: Records
    # `onnxq.*` metadata of the nodes themselves, which some tools drop.
    own: Mapping[str, Mapping[str, str]]
    # Specs of the plan in the model's metadata.
    plan: Mapping[str, QuantSpec]
    # Sites of that plan, and its float types.
    sites: SitePlans = ()
    float_types: PrecisionPlan | None = None
    # Notes that could not be read.
    problems: Cautions = field(default=())

    def find_record(self, chain: Chain) -> Record:
        """The note of the last node of the chain that has one; {} without any."""
        records = (source.get(name) for source in (self.by_node, self.own) for name in chain.names)
        return next(filter(None, records), {})

    def find_bits(self, chain: Chain) -> OriginBits | None:
        """The bits noted for the chain: the model's record, the plan, the node's own metadata, in this order.

        The record comes first because annotate-bits writes it, so it is never older than the plan.
        """
        names = chain.names
        written = [(read_noted_bits(self.by_node.get(name)), Origin.METADATA) for name in names]
        planned = [(self.plan[name].bits, Origin.PLAN) for name in names if name in self.plan]
        own = [(read_noted_bits(self.own.get(name)), Origin.METADATA) for name in names]
        notes = (*written, *planned, *own)
        return next(((bits, origin) for bits, origin in notes if bits is not None), None)


NO_NOTES = Notes({}, {}, {})


def read_notes(proto: ModelLike, plan: Plan | None = None) -> Notes:
    """The notes of onnxq in the model; `problems` names the unreadable. plan: in the place of the model's."""
    props = map_entries(proto.metadata_props)
    problems = []

    def read(key: str, parse: Callable[[str], T], missing: T) -> T:
        try:
            return parse(props[key]) if key in props else missing
        except PlanError as error:
            text = f"the model's {key} metadata cannot be read ({error.cause}); it is left out of account"
            problems.append(Caution("W106", text))
            return missing

    by_node: Records = read(BITS_KEY, parse_records, {})
    plan = plan or read(PLAN_KEY, unpack_plan, None)
    own = {node.name: notes for node in walk_nodes(proto.graph) if (notes := read_node_notes(node))}
    if plan is None:
        return Notes(by_node, own, {}, problems=tuple(problems))
    sites = plan.all_sites
    return Notes(by_node, own, list_specs(sites), sites, plan.precision, tuple(problems))


def parse_records(text: str) -> Records:
    """The records of nodes in the model's metadata. Raises PlanError for another text."""
    records = JsonText(BITS_KEY, text).parse(PlanError, "")
    if not isinstance(records, dict):
        raise PlanError(BITS_KEY, f"is {type(records).__name__}, not an object", code="Q403")
    return {
        name: _filter_record(record) for name, record in records.items() if isinstance(record, dict)
    }


def _filter_record(record: Record) -> Record:
    """The fields of a record whose types onnxq writes: bits are a number or its text, all others are text."""
    fits = {"bits": (int, str)}
    return {key: value for key, value in record.items() if isinstance(value, fits.get(key, (str,)))}


def list_specs(sites: Iterable[SitePlan]) -> dict[str, QuantSpec]:
    """The specs of a plan's sites by the names of the nodes that `emit` writes for them."""
    parts = ("q_node", "dq_node")
    return {name_part(site.site, part): site.spec for site in sites for part in parts}


def read_node_notes(node: NodeProto) -> dict[str, str]:
    """The `onnxq.*` metadata of a node, without the prefix."""
    entries = map_entries(node.metadata_props)
    return {
        key.removeprefix(NODE_PREFIX): value
        for key, value in entries.items()
        if key.startswith(NODE_PREFIX)
    }
