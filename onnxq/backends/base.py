"""The rules of an engine as data: specs it accepts, where its pairs go, costs of nodes, operators with 16-bit sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from onnx import TensorProto

from onnxq.arrays import Array, Shape
from onnxq.backends.costs import MachineCosts
from onnxq.errors import CauseAndFix
from onnxq.graph import Graph, NodeRef
from onnxq.graph.shapes import is_custom
from onnxq.numerics import SumOrder, SumOrders
from onnxq.sites import (
    Causes,
    Indices,
    LeftFloat,
    MaybeTensor,
    Names,
    NameSet,
    Refusal,
    Role,
    TensorId,
    Unquantized,
    drop_repeats,
)
from onnxq.spec import (
    FloatType,
    Granularity,
    PerBlock,
    PerTensor,
    QParams,
    QuantSpec,
    describe_spec,
)


class Data(Enum):
    """The form in which an operator reads its integer data."""

    PAIR = "behind a DequantizeLinear"
    STORED = "as an input"
    DYNAMIC = "quantized by the kernel itself, to uint8"


@dataclass(frozen=True, kw_only=True)
class IntegerProduct:
    """One operator, with the inputs that hold its data and its weights."""

    op: str
    domains: Names = ("",)
    reads: Data
    data: int = 0
    # Input of the data's zero point, whose type is that of the data; -1: none.
    zero: int = -1
    weights: Indices
    # The kernel is an integer one only with a QuantizeLinear behind it.
    result: bool = False


@dataclass(frozen=True)
class IntegerSums:
    """find_product: the entry for a node, None for other operators.

    pair_weights: the stored weights of a node as [rows, sums, 2], one pair for each 16-bit sum; None where the node's
    kernel is exact.
    """

    find_product: Callable[[NodeRef], IntegerProduct | None]
    pair_weights: Callable[[NodeRef, Array], Array | None]


_NOT_FLOAT32 = "its data is not float32, which alone has quantized kernels"
# Arithmetic on shapes and positions, which no rule means.
_INTEGERS = {TensorProto.BOOL} | {
    getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)
}
Shapes = Mapping[TensorId, Shape]

# Operators that people expect in integers: where none of them is, a line says why.
WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN")
# For operators of ONNX Runtime's own, whose weights no rule reaches.
REMEDY = "quantize the model before it is optimized for ORT"


class Output(str, Enum):
    """The type that an int8 kernel writes."""

    PAIR = "pair"  # the kernel exists only with a QuantizeLinear behind
    FLOAT = "float"  # the kernel always writes float
    EITHER = "either"  # float from an int32 bias, else with a pair
    # Whatever its readers ask for: a QuantizeLinear behind it is computed as well.
    FOLLOWS = "follows"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A node with the graph around it, as rules ask about it. Inputs are counted from 0."""

    node: NodeRef
    index: Graph
    shapes: Shapes

    def tensor(self, k: int) -> MaybeTensor:
        """The tensor at input k, None when absent."""
        return self.index.find_input(self.node, k)

    def is_constant(self, k: int) -> bool:
        """True when input k is there and constant."""
        return self.index.is_constant(self.tensor(k))

    def constant(self, k: int) -> Array | None:
        """The value of a constant input k."""
        return self.index.find_constant(self.tensor(k))

    def shape(self, k: int) -> Shape | None:
        """The shape of input k: observed, else declared; None where a dim is unknown."""
        return self.shape_of(self.tensor(k))

    def output_shape(self) -> Shape | None:
        """The shape of output 0."""
        return self.shape_of(self.node.result)

    def shape_of(self, tensor: MaybeTensor) -> Shape | None:
        """The shape of any tensor: observed, else declared; None where a dim is unknown."""
        observed = None if tensor is None else self.shapes.get(tensor)
        return self.index.find_sizes(tensor) if observed is None else observed

    def rank(self, k: int) -> int | None:
        """Rank of input k, known even where dims are not."""
        shape = self.shape(k)
        return self.index.find_rank(self.tensor(k)) if shape is None else len(shape)

    def list_types(self, inputs: Indices) -> set[int]:
        """The ONNX types of some inputs, of all for (), as far as they are declared."""
        tensors = map(self.tensor, inputs or range(len(self.node.inputs)))
        return set(map(self.index.find_dtype, tensors)) - {TensorProto.UNDEFINED}

    def attr(self, name: str, default: Any) -> Any:
        """An attribute or its default."""
        return self.node.attrs.get(name, default)


# Whether a float convolution of single channels is faster as a product by a matrix: by channels and sides of its data
# and of its result, and the taps of its kernel.
FitsMatrix = Callable[[Shape, Shape, int], bool]
# The reason against a candidate, for people; None without one.
# Why a node does not qualify, does not pay or stays float; None where it does none of that.
Reason = str | None
Check = Callable[[Candidate], Reason]


@dataclass(frozen=True, kw_only=True)
class PlacementRule:
    """One way in which an engine makes a quantized kernel of an operator."""

    name: str
    ops: Names
    why: str
    # Whether the kernel needs a pair behind it.
    output: Output = Output.PAIR
    # Inputs that take activations; (): every input that is not constant.
    data: Indices = (0,)
    # Input of a constant weight and bias; None where the operator has none.
    weight: int | None = None
    bias: int | None = None
    # Inputs of further constant weights.
    more_weights: Indices = ()
    # The kernel quantizes its data at each run by itself, and takes no scale of the file.
    dynamic: bool = False
    # Input and output must have one scale.
    shares: bool = False
    # The inputs must have one scale.
    alike: bool = False
    # Activations that the kernel computes as well when the pair stands behind them.
    fuses: Names = ()
    # From so many results on, such an activation is computed behind the pair's QuantizeLinear, on integers, since the
    # kernel clamps slowly; 0: never.
    footroom: int = 0
    # Kinds of CPU, or "any", for which a product of matrices is written as a Conv of one tap, whose kernel is faster.
    pointwise: Names = ()
    # The kernel saves time by itself; those of other rules only keep data in integers between such.
    compute: bool = False
    # Why a node does not qualify, and why int8 does not pay for one that does.
    check: Check = lambda _: None
    unpaid: Check = lambda _: None
    # The inputs that take a pair, in the place of `data`, where they depend on the graph.
    inputs: Callable[[Candidate], Indices] | None = None
    # The tensor behind which the closing pair stands, where it is not the node's own result.
    closes: Callable[[Candidate], MaybeTensor] = lambda _: None
    # The node reads pairs that stand for other readers, and shares their scale; it asks for none of its own.
    joins: bool = False
    # For rules that do not compute, in targets without costs: whether the node gains, given the chosen nodes.
    follow: Callable[[Candidate, NameSet], bool] = lambda _, __: True
    # Why the rule is off unless the person forces it with `quantize: true`; "" when it is on.
    opt_in: str = ""
    # The spec that an input takes, where it is not that of the operator's other activations.
    adapt: Callable[[int, QuantSpec], QuantSpec] = lambda _, spec: spec
    # The width in which its kernel is as exact as its result, where no one asks for another; None for any.
    bits: int | None = None
    # Whether its kernel in 8 bits computes in larger steps than a result with these numbers has, so that it is wide.
    coarse: Callable[[QParams], bool] = lambda _: False
    # Scale and zero point of the result, where the kernel has them built in. Their origin is `FIXED`.
    result: Callable[[QuantSpec], QParams | None] | None = None
    # The node is one of the two products of attention.
    attention: bool = False
    # The other nodes without which the engine has no such kernel.
    together: Callable[[Candidate], Names] = lambda _: ()

    def list_inputs(self, candidate: Candidate) -> Indices:
        """The inputs of a node that take a pair."""
        if self.inputs is not None:
            return self.inputs(candidate)
        return self.data or tuple(
            k for k in range(len(candidate.node.inputs)) if not candidate.is_constant(k)
        )


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Specs that a target accepts for a role on some operators."""

    role: Role
    # (): any operator.
    ops: Names = ()
    bits: Indices = (8,)
    storage: Names = ("int8", "uint8")
    symmetric: tuple[bool, ...] = (True, False)
    granularity: tuple[type[Granularity], ...] = (PerTensor,)
    # Whether scales are computed at each run.
    dynamic: tuple[bool, ...] = (False,)
    # Block sizes that a blocked kernel reads; (): any.
    blocks: Indices = ()
    # Why a weight of this shape has no kernel all the same, and the fix; None where it has.
    shape: Callable[[Shape, QuantSpec], CauseAndFix | None] = lambda _, __: None
    # The lowest opset that has such pairs.
    opset: int = 13
    # Price of the spec, for people; {op} stands for the operator.
    warning: str = ""

    def accepts_spec(self, spec: QuantSpec) -> bool:
        """True for the specs of this row, whatever their role and operator."""
        grain = spec.granularity
        if self.blocks and isinstance(grain, PerBlock) and grain.size not in self.blocks:
            return False
        return (
            spec.bits in self.bits
            and spec.storage in self.storage
            and spec.symmetric in self.symmetric
            and isinstance(grain, self.granularity)
            and spec.dynamic in self.dynamic
        )

    def describe_specs(self) -> str:
        """The specs of this row in a few words."""
        bits = "/".join(map(str, self.bits))
        schemes = "/".join("symmetric" if sym else "asymmetric" for sym in self.symmetric)
        grains = " or ".join(f"per {grain.word}" for grain in self.granularity)
        blocks = f" of {'/'.join(map(str, self.blocks))}" if self.blocks else ""
        return f"{bits} bits, {schemes}, {'/'.join(self.storage)}, {grains}{blocks}"


# Why an operator stays float whatever it would gain, given itself and the operator that makes its data, if one does;
# None where it may be quantized.
Exclusion = Callable[[Candidate, Candidate | None], Reason]


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """The operators that a device beside an engine's usual one has kernels for, by names as in `Target.no_kernel`.

    title: of the device. source: where its makers say so.
    """

    title: str
    source: str
    operators: NameSet

    def list_missing(self, nodes: Iterable[NodeRef]) -> Names:
        """Operators of these nodes without a kernel there."""
        return tuple(sorted({name_operator(node) for node in nodes} - self.operators))


def name_operator(node: NodeRef) -> str:
    """The operator of a node: its name in ONNX, else with its domain."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


@dataclass(frozen=True, kw_only=True)
class Target:
    """The rules of an engine."""

    name: str
    # In the order of precedence: the first that takes a node holds.
    rules: tuple[PlacementRule, ...]
    capabilities: tuple[Capability, ...]
    # By kind of CPU, the costs on which nodes are chosen by a minimum cut; without, every compute node that a rule
    # takes is quantized.
    costs: Mapping[str, MachineCosts] = field(default_factory=dict)
    # Of the costs where several engines share a file: each one's share; by the worst of them without.
    weights: Mapping[str, float] = field(default_factory=dict)
    # The targets of these engines.
    parts: tuple[Target, ...] = ()
    # Activations are quantized at each run, so that no range is calibrated.
    dynamic: bool = False
    # The engine reads zero points other than 0, and a DequantizeLinear on an int32 bias.
    zero_points: bool = True
    int32_bias: bool = True
    # The engine computes a Clip of 8-bit integers, which keeps the kernel in front of QuantizeLinear an integer one.
    bounds_integers: bool = True
    # The engine reads negative scales of blocks of weights.
    signed_scales: bool = False
    # The engine quantizes or fuses float nodes between pairs by itself, and must be kept from it.
    quantizes_alone: bool = False
    # Operators that the engine takes in integers between pairs, and computes wrongly: float ones are kept from it, too.
    misreads: Names = ()
    # The engine takes a graph as a whole, in integers: masks are given values that a scale holds, and sizes are fixed.
    # An operator's activations have one width: where readers of a tensor have another than its maker, a second pair
    # behind the first converts. Without, a tensor has one pair for all.
    whole: bool = False
    # Operators without a rule that read the pair of a tensor where others do.
    reads_pairs: Names = ()
    # The work of a node in 8 bits, in any unit; that in 16 is twice as much. For choices of widths.
    estimate_work: Callable[[Candidate], float] = lambda _: 1.0
    # The engine is ONNX Runtime on this machine, so that its times can be measured here.
    times_itself: bool = False
    fits_matrix: FitsMatrix = lambda *_: False
    # It stands for no engine: every node whose operator can be quantized is, by rules of its own.
    ideal: bool = False
    # Names of rewrites that are left out for it: by default those into single nodes that few engines have kernels for.
    skips: Names = ("activations", "layernorm", "residual", "prelu", "pool", "upsampling")
    # Rules for operators that stay float whatever they would gain, by name; the first that gives a reason holds.
    exclusions: Mapping[str, Exclusion] = field(default_factory=dict)
    # Those of them that only keep noise out: they yield where integers save a 20th of the network's time.
    yielding: Names = ()
    # Operators that have no quantized kernel but one on scales of each run.
    dynamic_ops: Names = ()
    # Those that it quantizes on scales of each run in bodies of loops, whose tensors no sample shows.
    looped_ops: Names = ()
    # A remedy for an output that is lost, for people.
    advice: str = "try another observer (mse, percentile)"
    # The float type of what is not quantized, where the configuration names none.
    high_precision: FloatType = FloatType.FLOAT32
    # Why a node has no kernel in a narrow float type; "" where it has.
    refuse_narrow: Callable[[Candidate, FloatType], str] = lambda _, __: ""
    # Why the engine cannot read a node at all, in float; "" where it can.
    refuse_float: Callable[[NodeRef], str] = lambda _: ""
    # The engine refuses or misreads specs outside the tables, so that plans are checked site by site.
    strict: bool = False
    # Operators without a quantized kernel in any placement, and those with a slower one: each with the reason. By their
    # names in ONNX, those of ONNX Runtime as "com.microsoft.NAME".
    no_kernel: Causes = field(default_factory=dict)
    no_gain: Causes = field(default_factory=dict)
    # The int8 weights of a node that a kernel adds up in 16 bits on some CPUs when it reads 8-bit activations, as
    # `numerics.weights` describes them; None where every kernel is exact.
    sum_order: Callable[[NodeRef, Shape], SumOrder | None] = lambda _, __: None

    @property
    def attention_rules(self) -> NameSet:
        """Names of the rules for the products of attention."""
        return frozenset(rule.name for rule in self.rules if rule.attention)

    @property
    def writes_matrices(self) -> bool:
        """True where float convolutions may become products, so that a file without integers can be faster, too."""
        return self.fits_matrix is not Target.fits_matrix

    @property
    def saturates(self) -> bool:
        """True when kernels on some CPUs add products in 16 bits."""
        return any(part.sum_order is not Target.sum_order for part in self.parts or (self,))

    def list_sum_orders(self, node: NodeRef, shape: Shape) -> SumOrders:
        """The orders in which the kernels of all its engines read a node's weight."""
        orders = (part.sum_order(node, shape) for part in self.parts or (self,))
        return drop_repeats(filter(None, orders))

    def rule_for(self, candidate: Candidate) -> tuple[PlacementRule | None, Unquantized | None]:
        """The rule that quantizes this node, or the reason why none does; (None, None): no rule is for its operator."""
        refusal = None
        unpaid = None
        node = candidate.node
        for rule in self.rules:
            if not node.is_onnx(*rule.ops):
                continue
            types = candidate.list_types(rule.data)
            if types & _INTEGERS:
                continue
            reason = rule.check(candidate) if types <= {TensorProto.FLOAT} else _NOT_FLOAT32
            # The first reason holds, and one about time comes before one about kernels: a kernel is there then.
            if reason is None:
                loss = rule.unpaid(candidate)
                if loss is None:
                    return rule, None
                unpaid = unpaid or LeftFloat(node.name, loss, rule.name)
            elif rule.compute:
                refusal = refusal or Refusal(node.name, reason, rule=rule.name, code="R102")
        return None, unpaid or refusal

    def without_kernel(self, node: NodeRef) -> Unquantized | None:
        """Why no node of this operator is quantized, as a reason for the node; None where one may be."""
        name = name_operator(node)
        cause = self.no_kernel.get(name)
        if cause is None and is_custom(node):
            kind = f"{node.op_type} of {node.domain}" if node.domain else node.op_type
            reason = f"{kind} is a custom operator: only its library knows what it computes"
            return LeftFloat(node.name, reason, "custom-operator", "F108")
        if cause is None and name in self.no_gain:
            return LeftFloat(node.name, self.no_gain[name], "no-kernel")
        # In mode `float` a target has no rule at all, and nobody asked for integers.
        if self.rules and name in WEIGHTED_OPS and not any(name in rule.ops for rule in self.rules):
            cause = cause or f"target {self.name} has no rule for {name}"
        if cause is None:
            return None
        return Refusal(node.name, cause, rule="no-kernel", code="R101")

    def capability(self, spec: QuantSpec, role: Role, op_type: str) -> Capability | None:
        """The first row of the table that accepts this spec; None without one."""
        return next((row for row in self._list_rows(role, op_type) if row.accepts_spec(spec)), None)

    def _list_rows(self, role: Role, op_type: str) -> list[Capability]:
        rows = (row for row in self.capabilities if row.role is role)
        return [row for row in rows if not row.ops or op_type in row.ops]

    def refuse(self, spec: QuantSpec, role: Role, node: NodeRef) -> Refusal | None:
        """The refusal of a spec that the target does not run, with those it takes instead; None where it runs."""
        if self.capability(spec, role, node.op_type) is not None:
            return None
        rows = self._list_rows(role, node.op_type)
        takes = "; or ".join(drop_repeats(row.describe_specs() for row in rows))
        reason = f"{self.name} has no {node.op_type} kernel for {describe_spec(spec)} {role}s"
        fix = f"use {takes}" if takes else "it stays float"
        return Refusal(node.name, reason, fix, code="R103")
