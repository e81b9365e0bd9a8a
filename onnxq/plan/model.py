"""The plan: which tensors are quantized, how, where, by which rule and why; once calibrated, with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from onnxq.arrays import Array, Floats, are_finite
from onnxq.backends import find_modes, list_names
from onnxq.config import Frozen
from onnxq.config.rows import Form, Written
from onnxq.config.schema import Finite, Natural, Opset, PassName
from onnxq.errors import PlanError, suggest_names
from onnxq.graph import Graph
from onnxq.numerics import SumOrders
from onnxq.plan import forms
from onnxq.plan.contents import Contents
from onnxq.sites import (
    Caution,
    Edge,
    Edges,
    LeftFloats,
    Names,
    Refusal,
    Role,
    Site,
    TensorId,
    UnquantizedNodes,
)
from onnxq.spec import FloatType, ObserverSpec, QParams, QuantSpec
from onnxq.wording import Word, show_as_summary


class PlacementMethod(Word):
    """How the nodes to quantize were chosen."""

    RULES = "rules"  # by the target's rules and predicted times
    MEASURED = "measured"  # by times measured on the machine that planned


@dataclass(frozen=True, kw_only=True)
class PlacementChoice:
    """How the placement of pairs was chosen.

    cpu: kind of CPU whose times decided, "any" for all kinds with a cost table; "" where none did.
    candidate: name of the placement that won the measurement; "" where none beat the float model, or none was timed.
    threads: threads of the measurement, 0 without one.
    speedups: time of the float model over that of each candidate.
    """

    method: Written[PlacementMethod] = PlacementMethod.RULES
    cpu: str = ""
    candidate: str = ""
    threads: Natural = 0
    speedups: Mapping[str, Finite] = field(default_factory=dict)


class AttentionKind(Word):
    """The type that attention's products compute in."""

    FLOAT = "float"
    QUANTIZED = "quantized"


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """Attention in float or quantized, with the figures of both.

    float_db, quantized_db: lowest SQNR of the outputs with attention in float and quantized, in dB; infinite where
        every output is exact. samples: number of held-back samples they were measured on.
    """

    kind: AttentionKind
    # JSON has no infinity, so that it is the default, which is left out.
    float_db: Finite = np.inf
    quantized_db: Finite = np.inf
    samples: Natural


class KeepReason(Word):
    """Why a node computes in float32 beside others that do not."""

    OVERFLOW = "overflow"  # values that it reads or makes, or a constant, come near the largest number of the type
    SUM = "sum"  # what it adds up may
    SMALL = "small"  # values that it makes lie below the normal numbers of the type
    PRECISION = "precision"  # from rounded inputs it makes something else
    SCALE = "scale"  # a scale of what it reads is no normal number of the type
    EXISTING = "existing"  # it reads a pair that the model came with, whose scale the type does not hold exactly
    KERNEL = "kernel"  # the engine has no kernel
    ONNX = "onnx"  # ONNX does not know the operator in the type, or nobody knows what type it reads
    SHAPES = "shapes"  # it computes shapes or positions
    RULE = "rule"  # the configuration says so
    UNSEEN = "unseen"  # no sample ran it
    CASTS = (
        "casts"  # it stands between such nodes, and Casts around it would cost more than it saves
    )
    TRIAL = "trial"  # without it the answers of the whole network were worse


@dataclass(frozen=True, kw_only=True)
class KeptFloat32:
    """A node that computes in float32. figure: the value that says why, a magnitude, or dB where precision is lost.

    detail: the engine's or the rule's own words.
    """

    node: str
    reason: KeepReason
    figure: Finite = 0.0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The float type of all nodes but some, and that of inputs and outputs.

    nodes: how many compute in `type`. limited: inputs that read a mask, limited to what the type holds. io: the type of
    float inputs and outputs; None: as the model came.
    """

    type: FloatType
    nodes: Natural = 0
    kept: tuple[KeptFloat32, ...] = ()
    limited: tuple[Annotated[Edge, forms.EDGE], ...] = ()
    io: FloatType | None = None


# The pass whose factors are subtracted; those of the others multiply, and so must be positive.
_ADDED = "bias_absorption"


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The factors of one pass for the channels of one tensor.

    name: the pass. "cross_layer_equalization": the node that makes the tensor multiplies it by the factors, and divided
        by them in its readers.
        "smoothquant": it is divided in front of the layers that read it, whose weights are multiplied.
        "bias_absorption": the node that makes the tensor subtracts them, the biases of its readers add their effect.
        "token_scales": in front of the layers that read it, each token is divided by its largest magnitude over the one
        factor, and multiplied behind.
    factors: float32 [channels]. anchor: the tensor's structural id in the prepared model before any such rewrite.
    """

    name: str
    tensor: TensorId
    factors: Floats = field(hash=False)
    anchor: str = ""

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A rotation of channels: they are multiplied by an orthogonal matrix, which a seed stands for.

    tensor: the first of those that lie in the same channels. size: of the matrix; a tensor of more channels is rotated
        part by part. anchor: as of a Scaling.
    """

    tensor: TensorId
    seed: int
    size: int
    anchor: str = ""
    name: str = "rotation"


def check_scaling(scaling: Scaling) -> Scaling:
    """The scaling itself. Raises ValueError for factors that no pass computes."""
    factors = scaling.factors
    added = scaling.name == _ADDED
    if factors.ndim != 1 or not are_finite(factors) or not (added or (factors > 0).all()):
        above = "" if added else " above 0"
        raise ValueError(f"the factors of {scaling.tensor} must be a row of finite numbers{above}")
    return scaling


class _ScalingRow(Frozen):
    """A Scaling, under `pass` the name of the pass that made it, or a Rotation, which has a size."""

    name: PassName
    tensor: str
    scope: str = ""
    anchor: str = ""
    factors: Any = None
    seed: Natural = 0
    size: Natural | None = None


def _read_scaling(row: _ScalingRow) -> Scaling | Rotation:
    tensor = TensorId(row.tensor, row.scope)
    if row.size is not None:
        return Rotation(tensor=tensor, seed=row.seed, size=row.size, anchor=row.anchor)
    factors = forms.read_floats(row.factors)
    return check_scaling(Scaling(name=row.name, tensor=tensor, factors=factors, anchor=row.anchor))


def _write_scaling(scaling: Scaling | Rotation) -> dict[str, Any]:
    tensor = scaling.tensor
    names = forms.leave_out_empty(tensor=tensor.name, scope=tensor.scope, anchor=scaling.anchor)
    names = {"pass": scaling.name, **names}
    if isinstance(scaling, Rotation):
        return names | {"seed": scaling.seed, "size": scaling.size}
    return names | {"factors": forms.write_array(scaling.factors)}


SCALING = Form(_ScalingRow, _read_scaling, _write_scaling)


# Of the plan's JSON. Plans of another version are refused, not converted.
SCHEMA = 2

# Lowest and highest value; None: no bound on that side.
Bound = tuple[Finite | None, Finite | None]
# The opset that pairs of 8 bits need; from the others on QuantizeLinear takes 4 and 16 bits and blocks, and FP8.
LEAST_OPSET = 13
_WIDE_OPSET = 21
_FLOAT8_OPSET = 19
_WIDE = ("int4", "uint4", "int16", "uint16")
Saturation = Literal["avoid", "allow"]


def _check_target(name: str) -> str:
    if not find_modes(name):
        known = list_names()
        raise PlanError(
            repr(name), f"is not one of {', '.join(known)}", suggest_names(name, known), code="Q403"
        )
    return name


_TARGET = Form(str, _check_target)
_SUM_ORDERS = Form(tuple[tuple[Natural | tuple[Natural, ...], ...], ...])


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """The decision for one site. Without qparams it waits for calibration, unless its spec is dynamic.

    The order of the fields is that of the keys in JSON.
    """

    site: Annotated[Site, forms.OWN_SITE]
    role: Role
    spec: Annotated[QuantSpec, forms.SPEC]
    qparams: Annotated[QParams | None, forms.OWN_NUMBERS] = None
    observer: Annotated[ObserverSpec, forms.OBSERVER] = ObserverSpec()
    # Name of the placement rule, and its reason for people.
    rule: Written[str] = ""
    reason: Written[str] = ""
    # The inputs that read the dequantized tensor. None: all of them, graph outputs and inner scopes included, except
    # inputs that have a site of their own; the pair then stands behind the producer.
    consumers: tuple[Annotated[Edge, forms.EDGE], ...] | None = None
    # Range of the values that a fused Relu or Clip in front guarantees; the scale must stay within.
    bound: Bound = (None, None)
    # Where the scale is computed at each run: values beyond are clipped first, so that a rare one in a batch does not
    # spoil the scale of all others.
    clip: Bound = (None, None)
    # (activation, weight) of an int32 bias, whose scale is the product of theirs.
    derived: tuple[Annotated[Site, forms.SITE], Annotated[Site, forms.SITE]] | None = None
    # The tensor that is quantized, also where the site is an input.
    tensor: Annotated[TensorId | None, forms.OWN_TENSOR] = None
    # Sites of one group, other than "", share a scale and a zero point.
    group: str = ""
    # Structural id of the tensor, to find it again when an export gave it another name.
    anchor: str = ""
    # Name of the DequantizeLinear of a pair that the model came with (of its QuantizeLinear where an operator on
    # integers reads that); "" for a pair to be written.
    dequantize: str = ""
    # The weight's values that the target's kernels add up in 16 bits, as `numerics.weights` describes them; none of
    # those sums may overflow. (): every kernel that reads the weight is exact.
    sum_orders: Annotated[SumOrders, _SUM_ORDERS] = ()
    # Quantized values of a weight, in the storage's numpy type and the weight's shape, where rounding to nearest gives
    # others; None: the model's own weight is rounded.
    values: Annotated[Array | None, forms.OWN_VALUES] = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """The site as messages, reports and refusals call it."""
        return str(self.site)

    @property
    def complete(self) -> bool:
        """True when nothing is missing: it has a scale and a zero point, or gets them at each run."""
        return self.qparams is not None or self.spec.dynamic

    def without_numbers(self) -> SitePlan:
        """The site as it is before calibration, which also chooses the integers of a constant."""
        return replace(self, qparams=None, values=None)

    @property
    def named_consumers(self) -> Edges:
        """The inputs that are named as readers; () where all read it."""
        return self.consumers or ()

    @property
    def quantized_tensor(self) -> TensorId:
        """The tensor that the site quantizes. Raises PlanError for an input whose plan names no tensor."""
        if isinstance(self.site, TensorId):
            return self.site
        if self.tensor is None:
            cause = "the plan does not name its tensor"
            raise PlanError(self.name, cause, "plan the model again", code="Q403")
        return self.tensor

    def find_readers(self, graph: Graph) -> Edges:
        """The inputs that read the dequantized tensor. graph: of the model that the plan is for."""
        if self.consumers is not None:
            return self.consumers
        return graph.list_consumers(self.site) if isinstance(self.site, TensorId) else (self.site,)

    def find_sure_readers(self, graph: Graph) -> Edges:
        """As `find_readers`; () for a site at one input that a person took `consumers` out of: nothing counts on it."""
        cut_off = self.consumers is None and isinstance(self.site, Edge)
        return () if cut_off else self.find_readers(graph)

    def find_lookups(self, graph: Graph) -> Edges:
        """The readers that look rows of this constant up, where rows can be dequantized behind them.

        That is so for a matrix in int8 with one scale a row, or in int4 in blocks of a row, around 0.
        """
        site = self.site
        if not self.role.is_weight or not isinstance(site, TensorId):
            return ()
        if not self.spec.has_rows or len(graph.find_shape(site) or ()) != 2:
            return ()
        return tuple(
            edge for edge in self.named_consumers if graph.find_node(edge.node).looks_up(edge.index)
        )

    def find_opset(self, graph: Graph | None) -> int:
        """The lowest opset in which the pair can be written. graph: of the model, None where none looks rows up."""
        # Rows are dequantized by operators that are no part of ONNX's opset, or old.
        lookups = None if graph is None else self.find_lookups(graph)
        if lookups is not None and lookups == self.consumers:
            return LEAST_OPSET
        if self.spec.storage in _WIDE or self.spec.has_blocks:
            return _WIDE_OPSET
        return _FLOAT8_OPSET if self.spec.is_float else LEAST_OPSET

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other)


SitePlans = tuple[SitePlan, ...]


@dataclass(frozen=True, kw_only=True)
class BiasPlan:
    """A float32 bias in the place of the model's own. edge: the input that reads it, which may be a new one."""

    edge: Annotated[Edge, forms.OWN_EDGE]
    values: Annotated[Floats, forms.FLOATS] = field(hash=False)

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other)


def _equal_fields(a: Any, b: Any) -> bool:
    """True for objects of one dataclass that are equal, arrays in their types and values: they have no truth value."""
    if type(a) is not type(b):
        return False
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return all(
        type(x) is type(y) and x.dtype == y.dtype and np.array_equal(x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        else x == y
        for x, y in pairs
    )


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Ordered decisions for one model, and everything needed to carry them out again.

    The order of the fields is that of the keys in JSON.
    """

    schema: ClassVar[int] = SCHEMA
    # Of `onnxq.backends`.
    target: Annotated[str, _TARGET]
    # Name of the model's file.
    model: str
    # Fingerprints of the prepared model: of its graph, and of its weights.
    topology: str
    weights: str
    # The lowest opset that the written model needs.
    opset: Written[Opset] = 13
    # Names of the preparation passes that ran.
    prepare: Written[Names] = ()
    # Where the calibration samples came from, for people.
    data: Written[str] = ""
    # Shapes that inputs were given before anything else, by name; 0 for an axis that stayed free.
    sizes: Mapping[str, tuple[Natural, ...]] = field(default_factory=dict)
    placement: PlacementChoice | None = None
    attention: AttentionChoice | None = None
    warnings: Written[tuple[Annotated[Caution, forms.CAUTION], ...]] = ()
    # Nodes of the pairs that the model came with.
    kept: Written[Names] = ()
    # Nodes to be guarded against quantization by the engine itself.
    float_nodes: Written[Names] = ()
    refusals: Written[tuple[Refusal, ...]] = ()
    left_float: Written[LeftFloats] = ()
    sites: Written[SitePlans] = ()
    # Name -> structural id of the nodes that sites name as consumers, to find them again under other names.
    nodes: Written[Mapping[str, str]] = field(default_factory=dict)
    # Factors per channel that the float model is rewritten with first.
    scalings: tuple[Annotated[Scaling | Rotation, SCALING], ...] = ()
    # Float biases to put in before the pairs.
    biases: tuple[BiasPlan, ...] = ()
    # Names were made to outlast changes of the graph around them; `weights` is then of the quantized weights alone.
    lasting: bool = False
    # The accuracy level of MatMulNBits, in the place of pairs in blocks; None: pairs.
    nbits: Literal[0, 1, 2, 3, 4] | None = None
    # Operators on integers in the place of 8-bit pairs.
    qoperators: bool = False
    # "allow": sums of the weights may overflow in kernels that add in 16 bits.
    saturation: Saturation = "avoid"
    # Pairs that the model came with, whose numbers never change; `consumers` are their readers, old and new.
    existing: SitePlans = ()
    # The float types around the pairs; None: float32.
    precision: PrecisionPlan | None = None
    # The values of its tensors on seeded inputs, in figures; None for a model that could not be run.
    contents: Contents | None = None

    def site(self, site: Site) -> SitePlan:
        """The decision for `site`; PlanError if there is none."""
        for planned in self.all_sites:
            if planned.site == site:
                return planned
        raise PlanError(site, "no such site in the plan", code="Q404")

    @property
    def all_sites(self) -> SitePlans:
        """The sites of pairs that the model came with, then those to be written."""
        return (*self.existing, *self.sites)

    @property
    def unquantized(self) -> UnquantizedNodes:
        """The reasons why nodes are float: those that were refused, then those that were left."""
        return (*self.refusals, *self.left_float)

    @property
    def by_site(self) -> dict[Site, SitePlan]:
        """Those of pairs to be written, by what they quantize."""
        return {site.site: site for site in self.sites}

    @property
    def calibrated(self) -> bool:
        """True when every site has a scale and a zero point, or gets them at each run."""
        return all(site.complete for site in self.sites)

    @property
    def quantizes_attention(self) -> bool:
        """True when attention was tried both ways and is quantized."""
        return self.attention is not None and self.attention.kind is AttentionKind.QUANTIZED

    def with_sites(self, sites: Iterable[SitePlan]) -> Plan:
        """The plan with these sites in the place of its own."""
        return replace(self, sites=tuple(sites))

    def replace_sites(self, changed: Mapping[Site, SitePlan]) -> Plan:
        """The plan with these sites, and biases in their units without numbers, which calibration adds."""
        return self.with_sites(
            changed.get(site.site, site)
            if changed.keys().isdisjoint(site.derived or ())
            else site.without_numbers()
            for site in self.sites
        )

    def list_scaled_for(self, inputs: Collection[Site]) -> frozenset[Site]:
        """Weights whose scales may have been raised for a bias in the units of one of these inputs."""
        return frozenset(
            site.derived[1]
            for site in self.sites
            if site.derived is not None and site.derived[0] in inputs
        )

    def by_role(self) -> dict[str, int]:
        """Number of sites per role."""
        return Counter(str(site.role) for site in self.sites)
