"""The plan: what is quantized, how, where, by which rule and why; with numbers once it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import PlanError
from onnxq.numerics import SumOrder
from onnxq.plan.choice import AttentionChoice, AttentionKind, PlacementChoice
from onnxq.plan.scalings import Scaling
from onnxq.sites import Caution, Edge, LeftFloat, Refusal, Role, Site, TensorId
from onnxq.spec import ObserverSpec, QParams, QuantSpec

SCHEMA = 2

Bound = tuple[float | None, float | None]
Saturation = Literal["avoid", "allow"]


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """One site's decision.

    consumers: the inputs that read the dequantized tensor; None means all of them, graph outputs and
        inner scopes included, but for inputs that have a site of their own (the pair sits at the producer).
    bound: what a fused Relu/Clip in front promises about the values; the scale must keep to it.
    derived: (activation site, weight site) of an int32 bias, whose scale is their product.
    group: sites with the same non-empty group share one scale and zero point.
    anchor: structural id of the tensor, to find it again when an export gave it another name.
    values: the weight's integers, in the storage's numpy type and the weight's shape, where they are not what
        rounding to nearest gives; None: quantize the model's own weight.
    dequantize: name of the DequantizeLinear of a pair that the model came with (of its QuantizeLinear where
        an operator on integers reads that); "" for a pair to be written.
    sum_orders: which of the weight's integers the target's kernels add up in 16 bits, as `numerics.saturation` says it;
        none of those sums may be able to overflow. (): every kernel that reads it is exact.
    """

    site: Site
    role: Role
    spec: QuantSpec
    qparams: QParams | None = None
    observer: ObserverSpec = ObserverSpec()
    rule: str = ""
    reason: str = ""
    consumers: tuple[Edge, ...] | None = None
    bound: Bound = (None, None)
    derived: tuple[Site, Site] | None = None
    group: str = ""
    tensor: TensorId | None = None
    anchor: str = ""
    values: NDArray[Any] | None = field(default=None, hash=False)
    sum_orders: tuple[SumOrder, ...] = ()
    dequantize: str = ""

    @property
    def quantized_tensor(self) -> TensorId:
        """The tensor that the site quantizes. Raises PlanError for an input whose plan names no tensor."""
        if isinstance(self.site, TensorId):
            return self.site
        if self.tensor is None:
            raise PlanError(str(self.site), "the plan does not name its tensor", "plan the model again", code="Q403")
        return self.tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SitePlan):
            return NotImplemented
        same = all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.name != "values")
        return same and _alike(self.values, other.values)


@dataclass(frozen=True, kw_only=True)
class BiasPlan:
    """A float bias that takes the place of the model's: values float32, read by this input, which may be new."""

    edge: Edge
    values: NDArray[np.float32] = field(hash=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BiasPlan):
            return NotImplemented
        return self.edge == other.edge and _alike(self.values, other.values)


def _alike(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Ordered decisions for one model, and everything needed to carry them out again.

    prepare: names of the preparation passes that ran; `float_nodes`: nodes the emitter must guard
    against the engine's own quantization; `choice`: which placement was taken and how (rules or
    measured), `opset`: the lowest opset the emitted model needs. nodes: structural ids of the nodes that
    sites name as consumers, to find them again under other names. scalings: factors per channel that the
    float model is rewritten with first. biases: float biases to put in before the pairs. lasting: the names were made
    to outlast changes of the graph around them; `weights` is then of the quantized weights alone.
    existing: pairs that the model came with, whose numbers never change; `consumers` are the inputs that read them, old
    and new, and `kept` the names of their nodes.
    saturation: "avoid", or "allow" where sums of the weights may overflow in kernels that add in 16 bits.
    """

    target: str
    model: str
    topology: str
    weights: str
    schema: int = SCHEMA
    opset: int = 13
    prepare: tuple[str, ...] = ()
    sites: tuple[SitePlan, ...] = ()
    float_nodes: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    left_float: tuple[LeftFloat, ...] = ()
    kept: tuple[str, ...] = ()
    warnings: tuple[Caution, ...] = ()
    data: str = ""
    placement: PlacementChoice | None = None
    attention: AttentionChoice | None = None
    nodes: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[Scaling, ...] = ()
    biases: tuple[BiasPlan, ...] = ()
    lasting: bool = False
    saturation: Saturation = "avoid"
    existing: tuple[SitePlan, ...] = ()

    def site(self, site: Site) -> SitePlan:
        """The decision for `site`; PlanError if there is none."""
        for found in self.all_sites:
            if found.site == site:
                return found
        raise PlanError(str(site), "no such site in the plan", code="Q404")

    @property
    def all_sites(self) -> tuple[SitePlan, ...]:
        """The sites that the model came with, then those to be written."""
        return (*self.existing, *self.sites)

    @property
    def calibrated(self) -> bool:
        """True when every site has its numbers."""
        return all(site.qparams is not None for site in self.sites)

    @property
    def quantizes_attention(self) -> bool:
        """True when attention was tried both ways and is quantized."""
        return self.attention is not None and self.attention.kind is AttentionKind.QUANTIZED

    def with_sites(self, sites: tuple[SitePlan, ...]) -> Plan:
        """The same plan with other sites."""
        return replace(self, sites=sites)

    def by_role(self) -> dict[str, int]:
        """Number of sites per role."""
        counts: dict[str, int] = {}
        for site in self.sites:
            counts[str(site.role)] = counts.get(str(site.role), 0) + 1
        return counts
