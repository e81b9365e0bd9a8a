"""Requests of the configuration, tensor by tensor: ordered rules over defaults, first match wins."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxq.backends import Target, find_target
from onnxq.config import Config, Rule, TensorConfig, change_fields, matches_any, suggest_names
from onnxq.errors import ConfigError
from onnxq.graph import Graph, GraphIndex, NodeRef, walk_from
from onnxq.sites import Caution, Names, NameSet, Refusal, Role, TensorId
from onnxq.spec import ObserverSpec, QuantSpec

# Axes of a weight, by operator: of output channels, the only one engines compute per channel, and of the reduction,
# along which weights are blocked.
_WEIGHT_AXES = {
    "Conv": (0, 1),
    "ConvTranspose": (1, 0),
    "MatMul": (1, 0),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "Gather": (0, 1),
}
# Operators between a projection and the output that it makes, beside constants: biases, scales, caps, types.
_BEHIND_SCORES = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Tanh",
    "Cast",
    "Identity",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
)
# Tables of embeddings by `embeddings`. Least squared error brings 1 dB at 4 bits, nothing at 8 (all-MiniLM-L6).
_TABLES = {
    "int8": TensorConfig(granularity="channel"),
    "int4": TensorConfig(
        bits=4, storage="int4", granularity="block", block_size=32, observer=ObserverSpec("mse")
    ),
}


def list_looped(index: GraphIndex, engine: Target, closed: Collection[str]) -> NameSet:
    """Names of nodes in closed bodies of loops that the engine quantizes on scales of each run, without ranges."""
    return frozenset(
        node.name
        for node in index.nodes
        if node.op_type in engine.looped_ops
        and node.scope in closed
        and index.is_looped(node.scope)
    )


def list_refusals(
    index: GraphIndex, closed: Mapping[str, Refusal], looped: Collection[str]
) -> Iterator[Refusal]:
    """Those of the closed scopes in which something needs ranges."""
    opened = {index.find_node(name).scope for name in looped}
    convolved = {node.scope for node in index.nodes if node.op_type == "Conv"}
    yield from (closed[scope] for scope in closed if scope not in opened - convolved)


# Tensors of a node, each with the role that it has there.
RoleTensors = Iterable[tuple[Role, TensorId]]


@dataclass(frozen=True)
class Match:
    """The request for one tensor, and the rule that made it (None: the defaults)."""

    request: TensorConfig
    rule: Rule | None = None


@dataclass
class Requests:
    """Looks rules up by the names of a graph's nodes and tensors. A graph of another kind overrides its names.

    applied: the numbers of the rules that decided on a tensor so far. looped: nodes in bodies of loops, whose data have
    a scale of each run, by name.
    """

    config: Config
    graph: Graph
    paths: dict[tuple[str, str], NameSet] = field(default_factory=dict)
    applied: set[int] = field(default_factory=set)
    looped: NameSet = frozenset()

    def __post_init__(self) -> None:
        for rule in self.config.rules:
            # Each path is a walk through the whole graph: once for its two ends, not for every
            # tensor.
            if rule.between is not None and rule.between not in self.paths:
                self.paths[rule.between] = self._find_nodes_between(*rule.between, rule=rule)

    def list_words(self, node: NodeRef) -> tuple[str, Names]:
        """The node's name and operators as rules may say them."""
        return node.name, (node.op_type,)

    def channel_axis(self, node: NodeRef) -> int | None:
        """The axis of the channels of the activations that a node reads, where they may have scales of their own."""
        return None

    def weight_axis(self, node: NodeRef, *, blocked: bool) -> int:
        """Axis of the weight's scales (output channels), or along which blocks run (reduction)."""
        if node.op_type == "Gemm":
            return int(node.is_transposed == blocked)
        return _WEIGHT_AXES[node.op_type][blocked]

    def match(self, role: Role, tensor: TensorId, nodes: Sequence[NodeRef]) -> Match:
        """The first rule that selects this tensor in this role for any of the nodes that make or read it."""
        config = self.config
        default = config.weights if role.is_weight else config.activations
        wide = config.projection_bits
        alone = role.is_weight and config.mode == "weight-only"
        # One that has the bits already keeps its storage.
        if wide not in (None, default.bits) and alone and any(map(self._makes_output, nodes)):
            # A byte holds it, of the sign that was asked for.
            default = change_fields(default, bits=wide, storage="")
        if not role.is_weight and config.mode == "dynamic":
            default = change_fields(default, dynamic=True)
        rule = self._find_rule(role, tensor, nodes)
        match = Match(default if rule is None else _apply_rule(rule, default, role), rule)
        # Such as LSTM: ONNX Runtime's integer kernel of it quantizes its data in each run.
        single = bool(nodes) and (
            nodes[0].op_type in find_target(config.target).dynamic_ops
            or nodes[0].name in self.looped
        )
        fixed = rule is not None and rule.set.dynamic is False
        if role.is_weight or fixed or not single:
            return match
        return replace(match, request=change_fields(match.request, dynamic=True))

    def match_table(self, tensor: TensorId, nodes: Sequence[NodeRef]) -> Match:
        """The request for a table of embeddings. Rules for all weights do not mean it, unless they leave them float."""
        rule = self._find_rule(Role.WEIGHT, tensor, nodes, table=True)
        if rule is None:
            return Match(_TABLES.get(self.config.embeddings, _TABLES["int8"]))
        default = _TABLES["int4" if rule.set.bits == 4 else "int8"]
        request = _apply_rule(rule, default, Role.WEIGHT)
        # Tables are quantized for small files, so 4 bits are packed unless the rule names a storage.
        packed = request.bits == 4 and rule.set.storage is None
        return Match(change_fields(request, storage="int4") if packed else request, rule)

    def _find_rule(
        self, role: Role, tensor: TensorId, nodes: Sequence[NodeRef], *, table: bool = False
    ) -> Rule | None:
        """The first rule that decides on a tensor of these nodes, which counts as applied. table: it must mean some."""
        for k, rule in enumerate(self.config.rules):
            meant = not table or _is_specific(rule) or rule.set.float
            if (
                rule.set.concerns_pairs
                and meant
                and any(self._selects_tensor(rule, role, tensor, node) for node in nodes)
            ):
                self.applied.add(k)
                return rule
        return None

    def make_spec(self, match: Match, role: Role, node: NodeRef) -> QuantSpec:
        """The spec that a request means for one input of a node. ConfigError when its granularity has no axis here."""
        request = match.request
        if not role.is_weight:
            return request.spec(self.channel_axis(node))
        return request.spec(self.weight_axis(node, blocked=request.granularity == "block"))

    def find_float_rule(self, node: NodeRef, tensors: RoleTensors) -> Rule | None:
        """The rule that keeps this node float, through itself or through a tensor it cannot do without."""
        return next((rule for rule in self._list_rules(node, tensors) if rule.set.float), None)

    def find_wide_rule(self, node: NodeRef) -> Rule | None:
        """The rule that keeps this node in float32 beside narrower float types."""
        rules = (rule for rule in self.config.rules if rule.set.high_precision is not None)
        return next((rule for rule in rules if self._may_select(rule, node)), None)

    def is_forced(self, node: NodeRef, tensors: RoleTensors, *, named: bool = False) -> bool:
        """True when a rule says `quantize: true` for this node. named: one that means some nodes, not all there are."""
        return any(
            rule.set.quantize and (_is_specific(rule) or not named)
            for rule in self._list_rules(node, tensors)
        )

    def _list_rules(self, node: NodeRef, tensors: RoleTensors) -> Iterator[Rule]:
        """The rules that fit these tensors of a node."""
        rules = (self.match(role, tensor, (node,)).rule for role, tensor in tensors)
        return (rule for rule in rules if rule is not None)

    def _makes_output(self, node: NodeRef) -> bool:
        """True for a MatMul or Gemm whose result is an output of the model, but for a bias or a type."""
        if node.op_type not in ("MatMul", "Gemm"):
            return False
        result = node.result
        while not self.graph.is_output(result):
            readers = self.graph.readers(result)
            after = readers[0] if len(readers) == 1 else None
            if after is None or after.op_type not in _BEHIND_SCORES or not after.outputs:
                return False
            others = [tensor for tensor in self.graph.list_reads(after) if tensor != result]
            if not all(map(self.graph.is_constant, others)):
                return False
            result = after.result
        # What a body of a Loop gives out is no output of the model.
        return not result.scope

    def _selects_tensor(
        self, rule: Rule, role: Role | None, tensor: TensorId, node: NodeRef
    ) -> bool:
        if rule.between is not None and node.name not in self.paths[rule.between]:
            return False
        name, ops = self.list_words(node)
        # An output of the model is an activation as well.
        is_output = Role.OUTPUT in rule.role and self.graph.is_output(tensor)
        role = Role.OUTPUT if is_output and role is Role.ACTIVATION else role
        return any(
            rule.selects(node=name, op=op, tensor=tensor.name, role=role, scope=node.scope)
            for op in ops
        )

    def _may_select(self, rule: Rule, node: NodeRef) -> bool:
        """True where the rule selects a tensor of the node, in whatever role."""
        # Roles are known once tensors are placed; until then each tensor may have the rule's.
        role = rule.role[0] if rule.role else None
        tensors = (TensorId(name) for name in node.inputs + node.outputs if name)
        return any(self._selects_tensor(rule, role, tensor, node) for tensor in tensors)

    def check_used(self, *others: Graph) -> None:
        """ConfigError for a rule that selects nothing in this graph or the others: it is a typo.

        others: the same model in other forms, whose names rules may use too.
        """
        nodes = [node for graph in (self.graph, *others) for node in graph.nodes]
        for rule in self.config.rules:
            if not any(self._may_select(rule, node) for node in nodes):
                fix = self._suggest_names(rule, others or (self.graph,))
                raise _make_error(rule, "matches nothing in this model", fix, code="Q309")

    def warn_of_unapplied(self) -> Iterator[Caution]:
        """A line for each rule that asks for integers, and decided on no tensor once everything is placed."""
        for k, rule in enumerate(self.config.rules):
            if k not in self.applied and rule.set.concerns_pairs and not rule.set.float:
                yield Caution(
                    "W149",
                    f"{rule.describe()} changes nothing: {self.config.target} has no kernel that reads or writes "
                    "integers there, or an earlier rule decides",
                )

    def _suggest_names(self, rule: Rule, graphs: Sequence[Graph]) -> str:
        """The nearest names for the first selector that no name in the graphs satisfies."""
        nodes = [node for graph in graphs for node in graph.nodes]
        words = [self.list_words(node) for node in nodes]
        known = {
            "node": {name for name, _ in words},
            "op": {op for _, ops in words for op in ops},
            "tensor": {name for node in nodes for name in node.inputs + node.outputs if name},
            "scope": {scope for graph in graphs for scope in graph.scopes},
        }
        for key, names in known.items():
            patterns = getattr(rule, key)
            if patterns and not any(matches_any(patterns, name) for name in names):
                return f"{key} {patterns[0]!r}: {suggest_names(patterns[0].strip('/*'), names)}"
        return "each selector matches something, but never on one node: loosen one of them"

    def _find_nodes_between(self, first: str, last: str, *, rule: Rule) -> NameSet:
        """Nodes on a path from `first` to `last` (tensor or node names), both ends included."""
        # What can be reached from the one end and leads to the other lies on a path.
        after = walk_from(self._find_ends(first, rule), self._list_readers)
        before = walk_from(self._find_ends(last, rule), self.graph.makers)
        if after.isdisjoint(before):
            cause = f"no path leads from {first!r} to {last!r}"
            raise _make_error(rule, cause, "swap them, or name nodes on one path", code="Q314")
        return frozenset(node.name for node in after & before)

    def _find_ends(self, name: str, rule: Rule) -> list[NodeRef]:
        nodes = self.graph.nodes
        # A name may be a node's and a tensor's; a node's comes first, as it does in `node:`.
        ends = [node for node in nodes if name in (node.name, self.list_words(node)[0])]
        ends = ends or [node for node in nodes if name in node.outputs]
        ends = ends or [node for node in nodes if name in node.inputs]
        if not ends:
            names = {name for node in nodes for name in (self.list_words(node)[0], *node.outputs)}
            cause = f"no node or tensor is called {name!r}"
            raise _make_error(rule, cause, suggest_names(name, names), code="Q314")
        return ends

    def _list_readers(self, node: NodeRef) -> list[NodeRef]:
        return [reader for tensor in node.results for reader in self.graph.readers(tensor)]


def _apply_rule(rule: Rule, default: TensorConfig, role: Role) -> TensorConfig:
    """The request of a rule. One for float asks for nothing else: the rest of its request is never read."""
    return default if rule.set.float else rule.apply(default, role)


def _is_specific(rule: Rule) -> bool:
    """True for a rule that names nodes, operators or tensors, not all there are."""
    return any(pattern != "*" for pattern in rule.node + rule.op + rule.tensor)


def _make_error(rule: Rule, cause: str, fix: str, *, code: str) -> ConfigError:
    return ConfigError(
        rule.describe(), cause, fix, code=code, file=rule.source, line=rule.line or None
    )
