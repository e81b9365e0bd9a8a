"""The placement problem: a graph as a target sees it, its quantizable operators, and the refusals.

A quantizable operator is a node that the target could run quantized, with the activation that folds into it. Pairs that
the model came with are planned around, shared where they fit, and never changed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxq.backends import Candidate, Output, PlacementRule, Shapes, Target, list_costs
from onnxq.backends.costs import MachineCosts
from onnxq.config import Config, TensorConfig
from onnxq.errors import ConfigError, OnnxqError
from onnxq.graph import LAYOUT_OPS, Graph, MaybeNode, ModelLike, NodeRef
from onnxq.graph.integer_products import is_rescaling
from onnxq.numerics import needs_bound, quantize
from onnxq.plan import Bound, SitePlan, SitePlans
from onnxq.planner.requests import Requests
from onnxq.planner.sums import count_saturating
from onnxq.sites import (
    Causes,
    Edge,
    Edges,
    NameSet,
    Refusal,
    Role,
    TensorId,
    Unquantized,
    UnquantizedNodes,
)
from onnxq.spec import QuantSpec

# ORT moves pairs through these.
_MOVES = LAYOUT_OPS | {"MaxPool", "Relu", "Clip"}
# Nodes of that kind in a row: exporters write two or three, and a longer search finds pairs of other operators.
_REACH = 6


@dataclass(frozen=True, eq=False)
class Existing:
    """The pairs of a prepared model, and the same model without them, which placement looks at.

    view: the model with every pair here taken out, so that readers read the tensor before it (a stored integer weight
        in the place of its float one). Nodes, inputs and all other tensors are called as in the model. None: no pairs.
    by_tensor: the pair of each computed tensor, by the tensor's name in the view.
    by_edge: the pair behind each input that reads a dequantized tensor, directly or through a guard.
    constants: weights and biases that are integers already.
    direct: inputs that read a dequantized tensor with nothing between.
    stand_ins: nodes of pairs that the view has too, as something that is no pair.
    weighted: nodes that read an integer constant through its DequantizeLinear, also behind nodes that only move it.
    """

    view: ModelLike | None = None
    by_tensor: Mapping[TensorId, SitePlan] = field(default_factory=dict)
    by_edge: Mapping[Edge, SitePlan] = field(default_factory=dict)
    constants: SitePlans = ()
    direct: frozenset[Edge] = frozenset()
    stand_ins: NameSet = frozenset()
    weighted: NameSet = frozenset()

    @cached_property
    def by_reader(self) -> Mapping[Edge, SitePlan]:
        """The pair of the constant that an input reads."""
        return {edge: site for site in self.constants for edge in site.named_consumers}

    def pair_for(self, edge: Edge | None, tensor: TensorId) -> SitePlan | None:
        """The pair that this input of a node reads or can share; edge None: the pair behind the tensor's maker."""
        if edge is None:
            return self.by_tensor.get(tensor)
        pair = self.by_edge.get(edge) or self.by_tensor.get(tensor)
        # A pair serves the readers in its own graph: no kernel forms across the border of a body.
        return pair if pair is not None and pair.site.scope == edge.scope else None

    @property
    def sites(self) -> SitePlans:
        """Every pair once: those of computed tensors, then constants."""
        pairs = (*self.by_tensor.values(), *self.by_edge.values())
        return (*{site.site: site for site in pairs}.values(), *self.constants)


NOTHING = Existing()


def is_between_pairs(index: Graph, existing: Existing, name: str) -> bool:
    """True when the engine quantizes this node as the model came: by its pairs, or on its own between them.

    index: of `existing.view`.
    """
    if name in existing.weighted:
        return True
    if not existing.by_tensor:
        return False
    node = index.find_node(name)
    computed = [node.make_edge(k) for k in index.list_computed(node)]
    reads = bool(computed) and all(_reads_pair(index, existing, edge) for edge in computed)
    return reads and _has_pair_behind(index, existing, node)


def _reads_pair(index: Graph, existing: Existing, edge: Edge) -> bool:
    """True when an input reads a pair of the model's own, directly or through nodes that move its values."""
    for _ in range(_REACH):
        if edge in existing.direct:
            return True
        if edge in existing.by_edge:
            return False
        maker = index.maker(index.find_node(edge.node), edge.index, *_MOVES)
        if maker is None:
            return False
        edge = maker.make_edge(0)
    return False


def _has_pair_behind(index: Graph, existing: Existing, node: NodeRef) -> bool:
    """True when a pair of the model's own stands behind the node, or behind nodes that move or clip its values."""
    for _ in range(_REACH):
        if node.result in existing.by_tensor:
            return True
        behind = index.readers(node.result)
        # With several readers ORT would have to find a pair on every way.
        if len(behind) != 1 or behind[0].op_type not in _MOVES:
            return False
        node = behind[0]
    return False


# The rule that refusals name where pairs that the model came with decide.
KEPT = "kept"


@dataclass(frozen=True, eq=False)
class QuantizableOp:
    """A node, with the facts that rules ask for, and the rule that places its pairs.

    data: activation edges with the tensors they read; out: the tensor whose pair closes it
    (behind `activation` where one folds in); bound: on that activation's values.
    """

    candidate: Candidate
    rule: PlacementRule
    data: tuple[tuple[Edge, TensorId], ...]
    out: TensorId
    activation: MaybeNode
    bound: Bound

    @property
    def node(self) -> NodeRef:
        """The node itself."""
        return self.candidate.node

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.node.name

    @property
    def weight(self) -> Edge | None:
        """The input that is the weight; None without one."""
        return next(iter(self.weights), None)

    @property
    def weights(self) -> Edges:
        """The inputs of all constant weights."""
        indices = () if self.rule.weight is None else (self.rule.weight, *self.rule.more_weights)
        return tuple(map(self.node.make_edge, indices))

    @property
    def bias(self) -> Edge | None:
        """The input that is the bias; None without one."""
        k = self.rule.bias
        return None if k is None or self.candidate.tensor(k) is None else self.node.make_edge(k)

    @property
    def roles(self) -> list[tuple[Role, TensorId]]:
        """The tensors that the operator needs quantized, with their roles."""
        weights = (self.candidate.tensor(edge.index) for edge in self.weights)
        roles = [(Role.ACTIVATION, tensor) for _, tensor in self.data]
        return roles + [(Role.WEIGHT, weight) for weight in weights if weight is not None]

    @property
    def writes_integers(self) -> bool:
        """True where the kernel writes integers alone: whoever reads floats needs a DequantizeLinear behind it."""
        return self.rule.output not in (Output.EITHER, Output.FOLLOWS)

    def closes_with_pair(self, bias: str) -> bool:
        """True where the kernel exists only with a pair behind it. bias: `int32` or `float`, as configured."""
        # A Gemm writes float only from an int32 bias.
        bare = self.rule.output is Output.EITHER and (self.bias is None or bias == "float")
        return bare or self.rule.output is Output.PAIR


@dataclass(frozen=True, eq=False)
class QuantizableOps:
    """All quantizable operators of a model, in topological order, and the reasons why other nodes are none.

    index: the graph, without the pairs it came with. complete: those that such pairs quantize already, as the engine
    needs it. partial: those that stay as they are, as their weights alone have pairs -> what keeps these from more.
    """

    index: Graph
    shapes: Shapes
    all: tuple[QuantizableOp, ...]
    reasons: UnquantizedNodes
    existing: Existing
    complete: NameSet
    partial: Causes

    @cached_property
    def by_name(self) -> dict[str, QuantizableOp]:
        """Each operator by its name."""
        return {op.name: op for op in self}

    @cached_property
    def by_out(self) -> dict[TensorId, QuantizableOp]:
        """Each operator by the tensor that its closing pair stands on."""
        return {op.out: op for op in self}

    def __iter__(self) -> Iterator[QuantizableOp]:
        return iter(self.all)

    def list_consumers(self, tensor: TensorId) -> list[tuple[Edge, QuantizableOp | None]]:
        """Who reads the tensor, and as which operator's activation (None: as something that stays float)."""
        readers = []
        for edge in self.index.list_consumers(tensor):
            op = self.by_name.get(edge.node)
            reads_data = op is not None and edge in dict(op.data)
            readers.append((edge, op if reads_data else None))
        return readers

    def list_readers(self, tensor: TensorId) -> list[QuantizableOp]:
        """The operators that read the tensor as an activation."""
        return [op for _, op in self.list_consumers(tensor) if op is not None]

    def find_integer_maker(self, tensor: TensorId) -> QuantizableOp | None:
        """The operator that makes the tensor in integers where it runs in them; None where that always writes float."""
        maker = self.by_out.get(tensor)
        return maker if maker is not None and maker.rule.output is not Output.FLOAT else None


def find_quantizable_ops(
    index: Graph,
    target: Target,
    shapes: Shapes,
    *,
    closed: Callable[[NodeRef], bool] = lambda _: False,
    existing: Existing = NOTHING,
    allow: bool = False,
) -> QuantizableOps:
    """Every node some rule of the target could quantize.

    index: of `existing.view`, where there are pairs. closed: nodes to leave alone (in loop bodies, in branches that
    calibration cannot reach). allow: sums of 16 bits may overflow. Compute nodes that no rule takes come back with
    their reasons.
    """
    ops = []
    reasons = []
    untouched = _find_nodes_at_existing_pairs(index)
    for node in index.nodes:
        if closed(node) or node.name in untouched:
            continue
        candidate = Candidate(node, index, shapes)
        rule, reason = target.rule_for(candidate)
        # A weight that is stored in integers has no kernel of its own, which is no news to who stored it so.
        if reason is not None and node.name not in existing.weighted:
            reasons.append(reason)
        op = None if rule is None else _make_op(candidate, rule)
        if op is not None:
            ops.append(op)
    complete = frozenset(op.name for op in ops if _is_complete(op, existing))
    partial = {
        op.name: obstacle
        for op in ops
        if op.name in existing.weighted - complete
        and (obstacle := _find_obstacle(op, target, existing, allow))
    }
    return QuantizableOps(index, shapes, tuple(ops), tuple(reasons), existing, complete, partial)


def _is_complete(op: QuantizableOp, existing: Existing) -> bool:
    """True when the pairs that the model came with are all that the operator's kernel needs."""
    data = {edge for edge, _ in op.data}
    if not data or not data <= existing.direct & existing.by_edge.keys():
        return False
    if op.weight is not None and op.weight not in existing.direct:
        return False
    # Other tools close an operator in front of its activation.
    closing = {op.out, op.node.result}
    return op.rule.output is not Output.PAIR or not closing.isdisjoint(existing.by_tensor)


_FLOAT_ALONE = "in a form that only float data are multiplied by"


def _find_obstacle(op: QuantizableOp, target: Target, existing: Existing, allow: bool) -> str:
    """The obstacle to a kernel that multiplies the integers of the operator's weights, as they are, by data of 8 bits.

    allow: sums of 16 bits may overflow. "" without an obstacle.
    """
    for edge in op.weights:
        pair = existing.by_reader.get(edge) if edge in existing.direct else None
        value = op.candidate.constant(edge.index)
        if pair is None or pair.qparams is None or value is None:
            return _FLOAT_ALONE
        spec = _fill_storage(pair.spec)
        if target.refuse(spec, Role.WEIGHT, op.node) is not None:
            return _FLOAT_ALONE
        # Some tools leave the float weight in the file, in front of a QuantizeLinear.
        codes = quantize(value, pair.qparams, spec) if value.dtype.kind == "f" else value
        orders = (
            () if allow or not needs_bound(spec) else target.list_sum_orders(op.node, value.shape)
        )
        if count_saturating(codes, orders)[1]:
            return "in integers whose sums overflow 16 bits on CPUs without VNNI, unless `saturation: allow` lets them"
    return ""


def _fill_storage(spec: QuantSpec) -> QuantSpec:
    """The spec of a pair as an engine reads it, which knows nothing of bits that its integers do not fill."""
    return spec if spec.is_float else replace(spec, bits=spec.storage_bits)


def _find_nodes_at_existing_pairs(index: Graph) -> NameSet:
    """Nodes at a DequantizeLinear or QuantizeLinear that nobody can share: they are somebody's work, and kept.

    With them the products that make floats of sums of integers, and their scales of each run.
    """
    names = {node.name for node in index.nodes if is_rescaling(index, node)}
    for node in index.nodes:
        if node.op_type == "DequantizeLinear":
            names.update(edge.node for edge in index.list_consumers(node.result))
        maker = index.maker(node) if node.op_type == "QuantizeLinear" else None
        if maker is not None:
            names.add(maker.name)
    return frozenset(names)


def _make_op(candidate: Candidate, rule: PlacementRule) -> QuantizableOp | None:
    node = candidate.node
    data = []
    for k in rule.list_inputs(candidate):
        tensor = candidate.tensor(k)
        # A kernel needs all of its inputs: one that the node leaves out makes it another operator.
        if tensor is None:
            return None
        data.append((node.make_edge(k), tensor))
    out = rule.closes(candidate) or node.result
    activation, bound = _find_fused_activation(candidate, rule, out)
    closing = out if activation is None else activation.result
    return QuantizableOp(candidate, rule, tuple(data), closing, activation, bound)


def _find_fused_activation(
    candidate: Candidate, rule: PlacementRule, out: TensorId
) -> tuple[MaybeNode, Bound]:
    """The activation that only this node feeds, and its bounds."""
    index = candidate.index
    unbounded = (None, None)
    # Somebody else would see the value in front of the activation, which the kernel does not write.
    node, k = index.find_reader(out, *rule.fuses) or (None, 0)
    if node is None or k or not rule.fuses:
        return None, unbounded
    ends = index.read_clip(node)
    # Scales are made of ranges that hold zero: other ends would clip values that the activation lets through.
    if ends is None or not ends[0] <= 0 <= ends[1]:
        return None, unbounded
    low, high = (None if math.isinf(end) else end for end in ends)
    return node, (low, high)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacementProblem:
    """Everything that the choice of operators to quantize depends on.

    refused: operators whose requested specs the target cannot run, and others to leave float, by name.
    widths: bits of the activations of operators by name, where no rule of the configuration says other ones; for
    engines that take whole graphs.
    """

    config: Config
    engine: Target
    ops: QuantizableOps
    requests: Requests
    refused: Mapping[str, Unquantized]
    widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def costs(self) -> Mapping[str, MachineCosts]:
        """Of the kind of CPU that is planned for, by engine."""
        return list_costs(self.engine, self.config.cpu)

    @cached_property
    def apart(self) -> NameSet:
        """Names of operators on scales of each run beside others whose scales stand in the file."""
        if self.engine.dynamic:
            return frozenset()
        return frozenset(op.name for op in self.ops if is_dynamic(self.requests, op))


def state_problem(
    graph: Graph,
    requests: Requests,
    engine: Target,
    *,
    shapes: Shapes,
    closed: Callable[[NodeRef], bool],
    existing: Existing = NOTHING,
) -> PlacementProblem:
    """The problem of one graph, for the configuration of the requests.

    graph: without the pairs that it came with. shapes: of computed tensors, where they are known. closed: nodes to
    leave alone. existing: those pairs.
    """
    allow = requests.config.saturation == "allow"
    ops = find_quantizable_ops(graph, engine, shapes, closed=closed, existing=existing, allow=allow)
    refused = {
        op.name: refusal
        for op in ops
        # Nothing is asked of pairs that the model came with: they stay as they are.
        if op.name not in ops.complete
        and (refusal := _find_spec_refusal(existing, requests, engine, op)) is not None
    }
    return PlacementProblem(
        config=requests.config, engine=engine, ops=ops, requests=requests, refused=refused
    )


def _find_spec_refusal(
    existing: Existing, requests: Requests, engine: Target, op: QuantizableOp
) -> Refusal | None:
    """The refusal of an operator whose specs the target cannot run; None where it can."""
    refusal = _refuse_scale(requests, engine, op)
    if refusal is not None:
        return refusal
    multiplied = set()
    by_reader = existing.by_reader
    stored = {op.candidate.tensor(e.index): by_reader[e] for e in op.weights if e in by_reader}
    for role, tensor in op.roles:
        # Weights alone have pairs, so that a request for activations refuses nothing.
        if role is Role.ACTIVATION and requests.config.mode == "weight-only":
            continue
        pair = existing.by_tensor.get(tensor) or stored.get(tensor)
        try:
            match = requests.match(role, tensor, (op.node,))
            spec = _fill_storage(pair.spec) if pair else requests.make_spec(match, role, op.node)
        except OnnxqError as error:
            return Refusal(op.name, error.fault, error.fix, op.rule.name, "R103")
        refusal = engine.refuse(spec, role, op.node) or _refuse_shape(engine, op, spec, role)
        if refusal is not None:
            return replace(refusal, rule=op.rule.name)
        multiplied.add(spec.is_float)
    if len(multiplied) > 1:
        reason = f"{engine.name} multiplies FP8 by FP8 and integers by integers, nothing else"
        fix = "ask for the same storage for its input and its weight"
        return Refusal(op.name, reason, fix, op.rule.name, "R103")
    return None


def is_dynamic(requests: Requests, op: QuantizableOp) -> bool:
    """True for an operator whose data are to be quantized on scales of each run."""
    return any(
        requests.match(Role.ACTIVATION, tensor, (op.node,)).request.dynamic for _, tensor in op.data
    )


def _refuse_scale(requests: Requests, engine: Target, op: QuantizableOp) -> Refusal | None:
    """The refusal of an operator whose kernel computes the scale of its data, where another is asked for."""
    if requests.config.mode == "weight-only" or not op.rule.dynamic:
        return None
    matches = (requests.match(Role.ACTIVATION, tensor, (op.node,)) for _, tensor in op.data)
    if all(_can_be_dynamic(match.request) for match in matches):
        return None
    reason = (
        f"{engine.name} runs {op.node.op_type} in integers only on scales of each run: 8-bit asymmetric uint8, "
        "one a tensor"
    )
    fix = "leave `dynamic`, bits, scheme, signed and granularity of its activations as they are in ort-int8"
    return Refusal(op.name, reason, fix, op.rule.name, "R101")


def _can_be_dynamic(request: TensorConfig) -> bool:
    try:
        return request.spec(None).dynamic
    except ConfigError:
        return False


def _refuse_shape(engine: Target, op: QuantizableOp, spec: QuantSpec, role: Role) -> Refusal | None:
    """A weight whose shape the kernel for this spec does not take."""
    if not role.is_weight or op.rule.weight is None:
        return None
    row = engine.capability(spec, role, op.node.op_type)
    shape = op.candidate.shape(op.rule.weight)
    if row is None or shape is None:
        return None
    reason_and_fix = row.shape(shape, spec)
    return None if reason_and_fix is None else Refusal(op.name, *reason_and_fix, code="R103")
