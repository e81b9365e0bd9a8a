"""What every target says of itself: the specs it accepts, and where pairs go, as tables of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from numpy.typing import NDArray

from onnxq.graph import Graph, NodeRef
from onnxq.numerics import SumOrder
from onnxq.sites import LeftFloat, Refusal, Role, TensorId, Unquantized
from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec

Shape = tuple[int, ...]
Shapes = Mapping[TensorId, Shape]


class Output(str, Enum):
    """What an int8 kernel writes."""

    PAIR = "pair"  # the kernel exists only with a QuantizeLinear behind
    FLOAT = "float"  # the kernel always writes float
    EITHER = "either"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A node with what a rule needs to know of its surroundings."""

    node: NodeRef
    index: Graph
    shapes: Shapes

    def tensor(self, k: int) -> TensorId | None:
        """The tensor at input k, None when absent."""
        if k >= len(self.node.inputs) or not self.node.inputs[k]:
            return None
        return self.index.resolve(self.node.inputs[k], self.node.scope)

    def is_constant(self, k: int) -> bool:
        """True when input k is there and constant."""
        found = self.tensor(k)
        return found is not None and self.index.is_constant(found)

    def constant(self, k: int) -> NDArray[Any] | None:
        """The value of a constant input k."""
        found = self.tensor(k)
        return None if found is None else self.index.constant(found)

    def shape(self, k: int) -> Shape | None:
        """The shape of input k as observed, or as declared when all dims are known."""
        found = self.tensor(k)
        return None if found is None else self.shape_of(found)

    def output_shape(self) -> Shape | None:
        """The shape of output 0."""
        return self.shape_of(TensorId(self.node.outputs[0], self.node.scope))

    def shape_of(self, tensor: TensorId) -> Shape | None:
        """Observed shape of any tensor, else the static one."""
        if tensor in self.shapes:
            return self.shapes[tensor]
        declared = self.index.shape(tensor)
        if declared is None or not all(isinstance(dim, int) for dim in declared):
            return None
        return tuple(dim for dim in declared if isinstance(dim, int))

    def rank(self, k: int) -> int | None:
        """Rank of input k, known even where dims are not."""
        found = self.tensor(k)
        if found is None:
            return None
        if found in self.shapes:
            return len(self.shapes[found])
        declared = self.index.shape(found)
        return None if declared is None else len(declared)

    def attr(self, name: str, default: Any) -> Any:
        """An attribute or its default."""
        return self.node.attrs.get(name, default)


Check = Callable[[Candidate], str | None]


@dataclass(frozen=True, kw_only=True)
class PlacementRule:
    """One way an engine makes a quantized kernel of an operator.

    data: input indices that take activations (empty: every input that is not constant).
    weight, bias: input index of a constant weight or bias, None when the operator has none.
    output: whether the kernel needs a pair behind it; shares: input and output must have one scale.
    alike: the inputs must have one scale.
    fuses: activations that disappear into the kernel when the pair sits behind them.
    compute: this rule is worth quantizing for; the others only keep data in integers between.
    inputs: which inputs take a pair, where that depends on the graph; it takes the place of `data`.
    closes: the tensor whose pair closes the unit, where it is not the node's own result.
    joins: reads the pairs that are there for others' sake and shares their scale; it asks for none of its own.
    follow: for rules that do not compute, in targets without costs: does the node gain, given the nodes chosen?
    opt_in: why the rule is off unless the person forces it with `quantize: true`; "" when it is on.
    attention: it is on as well when the configuration asks for quantized attention.
    together: the other nodes without which the kernel does not come about.
    check: why a given node does not qualify, or None. unpaid: why int8 does not pay for one that does, or None.
    kernel: what the engine's optimized graph then shows; tests assert it.
    """

    name: str
    ops: tuple[str, ...]
    kernel: str
    why: str
    output: Output = Output.PAIR
    data: tuple[int, ...] = (0,)
    weight: int | None = None
    bias: int | None = None
    shares: bool = False
    alike: bool = False
    fuses: tuple[str, ...] = ()
    compute: bool = False
    check: Check = lambda _: None
    unpaid: Check = lambda _: None
    inputs: Callable[[Candidate], tuple[int, ...]] | None = None
    closes: Callable[[Candidate], TensorId | None] = lambda _: None
    joins: bool = False
    follow: Callable[[Candidate, frozenset[str]], bool] = lambda _, __: True
    opt_in: str = ""
    attention: bool = False
    together: Callable[[Candidate], tuple[str, ...]] = lambda _: ()


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The specs a target accepts for a role on some operators, and what it costs.

    ops empty: any operator. `opset` is the lowest that can say it; `fix` is for the refusal of the rest.
    blocks: the block sizes a blocked kernel reads (empty: any).
    shape: why a weight of this shape has no kernel all the same, and what to do, or None.
    """

    role: Role
    ops: tuple[str, ...] = ()
    bits: tuple[int, ...] = (8,)
    storage: tuple[str, ...] = ("int8", "uint8")
    symmetric: tuple[bool, ...] = (True, False)
    granularity: tuple[type, ...] = (PerTensor,)
    blocks: tuple[int, ...] = ()
    shape: Callable[[Shape, QuantSpec], tuple[str, str] | None] = lambda _, __: None
    opset: int = 13
    warning: str = ""


def _exact(node: NodeRef, shape: Shape) -> SumOrder | None:
    """Every kernel adds in 32 bits."""
    return None


@dataclass(frozen=True, kw_only=True)
class Target:
    """An engine's rules as data.

    costs: units are chosen by a minimum cut on predicted times; else every compute unit the rules take is quantized.
    zero_points: whether a zero point other than 0 can be said. int32_bias: whether a bias may be dequantized int32.
    quantizes_alone: the engine quantizes or fuses by itself what stands between pairs, and must be kept from it.
    times_itself: ONNX Runtime on this machine is the engine, so its times say something.
    half: it computes float16 itself, so a float16 model keeps its types; else it is planned and written in float32.
    strict: what the tables do not accept the engine refuses or reads wrongly, so plans are checked site by site.
    no_kernel: operators that cost time and have no quantized kernel in any placement, with what there is instead.
    no_gain: operators whose quantized kernel is slower than the float one in any placement, with the reason.
    sum_order: which int8 weights of a node a kernel adds up in 16 bits on some CPUs when it reads 8-bit activations,
        as `numerics.saturation` says it; None where every kernel is exact.
    """

    name: str
    rules: tuple[PlacementRule, ...]
    capabilities: tuple[Capability, ...]
    costs: bool = True
    zero_points: bool = True
    int32_bias: bool = True
    quantizes_alone: bool = True
    times_itself: bool = True
    half: bool = False
    strict: bool = False
    no_kernel: Mapping[str, str] = field(default_factory=dict)
    no_gain: Mapping[str, str] = field(default_factory=dict)
    sum_order: Callable[[NodeRef, Shape], SumOrder | None] = _exact

    @property
    def saturates(self) -> bool:
        """True when kernels on some CPUs add products in 16 bits."""
        return self.sum_order is not _exact

    def rule_for(self, candidate: Candidate) -> tuple[PlacementRule | None, Unquantized | None]:
        """The rule that quantizes this node; or why none does (None, None: the engine has no such kernel)."""
        refusal: Refusal | None = None
        unpaid: LeftFloat | None = None
        for rule in self.rules:
            if candidate.node.op_type not in rule.ops or candidate.node.domain not in ("", "ai.onnx"):
                continue
            reason = rule.check(candidate)
            loss = rule.unpaid(candidate) if reason is None else None
            if reason is None and loss is None:
                return rule, None
            if loss is not None:
                unpaid = unpaid or LeftFloat(candidate.node.name, loss, rule.name)
            elif reason is not None and rule.compute and refusal is None:
                refusal = Refusal(candidate.node.name, reason, rule=rule.name, code="R102")
        return None, unpaid or refusal

    def without_kernel(self, name: str, op_type: str) -> Unquantized | None:
        """Why this node is quantized in no placement, as no node of its operator is; None where it may be."""
        if op_type in self.no_kernel:
            return Refusal(name, self.no_kernel[op_type], rule="no-kernel", code="R101")
        if op_type in self.no_gain:
            return LeftFloat(name, self.no_gain[op_type], "no-kernel")
        return None

    def capability(self, spec: QuantSpec, role: Role, op_type: str) -> Capability | None:
        """The table row that accepts this spec, or None."""
        for row in self.capabilities:
            if (
                row.role is role
                and (not row.ops or op_type in row.ops)
                and spec.bits in row.bits
                and spec.storage in row.storage
                and spec.symmetric in row.symmetric
                and isinstance(spec.granularity, row.granularity)
                and _fits_blocks(spec, row)
            ):
                return row
        return None

    def refuse(self, spec: QuantSpec, role: Role, node: NodeRef) -> Refusal | None:
        """None if the target runs this spec; else what it would take instead."""
        if self.capability(spec, role, node.op_type) is not None:
            return None
        rows = [row for row in self.capabilities if row.role is role and (not row.ops or node.op_type in row.ops)]
        takes = "; or ".join(_describe(row) for row in rows) or "nothing"
        reason = f"{self.name} has no {node.op_type} kernel for {describe(spec)} {role}s"
        return Refusal(node.name, reason, f"use {takes}", code="R103")


def _fits_blocks(spec: QuantSpec, row: Capability) -> bool:
    return not row.blocks or not isinstance(spec.granularity, PerBlock) or spec.granularity.size in row.blocks


_GRAIN = {PerTensor: "per tensor", PerChannel: "per channel", PerBlock: "per block"}


def describe(spec: QuantSpec) -> str:
    """A spec in a few words: "8-bit asymmetric uint8 per tensor"."""
    scheme = "symmetric" if spec.symmetric else "asymmetric"
    return f"{spec.bits}-bit {scheme} {spec.storage} {_GRAIN[type(spec.granularity)]}"


def _describe(row: Capability) -> str:
    schemes = "/".join("symmetric" if sym else "asymmetric" for sym in row.symmetric)
    grains = " or ".join(_GRAIN[grain] for grain in row.granularity)
    bits = "/".join(map(str, row.bits))
    blocks = f" of {'/'.join(map(str, row.blocks))}" if row.blocks else ""
    return f"{bits} bits, {schemes}, {'/'.join(row.storage)}, {grains}{blocks}"
