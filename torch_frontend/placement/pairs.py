"""The planner's sites as quantizers of a torch module, and the account of all products."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx

from onnxq.backends import find_target
from onnxq.config import Config, QuantizerSpec
from onnxq.errors import ConfigError
from onnxq.numerics import SumOrder
from onnxq.plan import Bound, SitePlan
from onnxq.planner.choose import choose_ops
from onnxq.planner.place import Placement, Placer
from onnxq.planner.problem import PlacementProblem, state_problem
from onnxq.sites import Edge, LeftFloat, Refusal, Role, TensorId, Unquantized
from onnxq.spec import ObserverSpec, PerTensor, QuantSpec
from torch_frontend.placement.graph import Argument, CallGraph, CallNode, CallWeight, read_call
from torch_frontend.placement.rules import CallRequests, front_end_target
from torch_frontend.qmodules.registry import FUSED, GROUPS
from torch_frontend.tracing.names import is_constant, read_op


@dataclass(frozen=True)
class Product:
    """One product. subject: its call. op: torch's operator or function. weight: the site of its weight; "" without one.

    reason: why it stays float; None where it is quantized.
    """

    subject: str
    op: str
    weight: str = ""
    reason: Unquantized | None = None


def list_products(
    graph: CallGraph, placement: Placement, reasons: Iterable[Unquantized]
) -> list[Product]:
    """Every product of a graph in its order. reasons: by the paths of calls."""
    by_subject: dict[str, Unquantized] = {}
    for reason in reasons:
        by_subject.setdefault(reason.subject, reason)
    weights = set()
    data = set()
    for site in placement.sites:
        found = weights if site.role.is_weight else data
        found |= {
            edge.node for edge in site.consumers or graph.list_consumers(site.quantized_tensor)
        }
    calls = defaultdict(list)
    for node in graph.nodes:
        if node.op.name in GROUPS["products"] or node.function in GROUPS["product_functions"]:
            calls[node.call].append(node)
    products = []
    for call, nodes in calls.items():
        weight = next(
            (graph.weights[node.name].site for node in nodes if node.name in graph.weights), ""
        )
        quantized = any(node.name in (weights if weight else data) for node in nodes)
        path = nodes[0].path
        reason = (
            None
            if quantized
            else by_subject.get(path) or by_subject.get(call) or _explain_closed(graph, nodes, path)
        )
        products.append(Product(call, nodes[0].op.name or nodes[0].function, weight, reason))
    return products


def _explain_closed(graph: CallGraph, nodes: Iterable[CallNode], path: str) -> Unquantized:
    """The reason of a product for which the planner has none, as nothing can be placed at it."""
    if all(
        tensor in graph.integers or tensor in graph.constants
        for node in nodes
        for tensor in node.inputs
    ):
        return LeftFloat(path, "it reads no floats that are computed", "integers", "F103")
    return Refusal(path, "what it reads has no place for a pair", "", "closed", "R105")


# The quantizer of activations on scales of each run.
_DYNAMIC = "dynamic"


@dataclass(frozen=True)
class Decision:
    """A change by a pass: a quantizer switched off, a batch norm folded or not. subject: site or module."""

    subject: str
    reason: str
    rule: str


@dataclass(frozen=True)
class Sums:
    """Products of a weight that a kernel adds in 16 bits: their order, and the site of the data."""

    order: SumOrder
    data: str


@dataclass(eq=False)
class Pair:
    """One quantizer to be. readers: the arguments that get the quantized value; None: all of them.

    leader: the site whose qparams it uses; None when it has its own. contributes: values here count for the leader's
    range. bound: of a fused activation in front; quantized values keep inside it, so that the engine can drop the
    activation. sums: which of a weight's may not overflow.
    """

    site: str
    role: Role
    spec: QuantSpec
    observer: ObserverSpec
    quantizer: QuantizerSpec
    value: fx.Node | None = None
    weight: CallWeight | None = None
    readers: list[Argument] | None = None
    leader: str | None = None
    contributes: bool = True
    disabled: str | None = None
    bound: Bound = (None, None)
    sums: Sums | None = None

    @property
    def layer(self) -> str:
        """Path of the layer whose weight it quantizes; "" for other tensors."""
        return "" if self.weight is None else self.weight.module


@dataclass
class Pairs:
    """The quantizers of a whole graph, activations in its order, then weights; and why the rest stays float."""

    pairs: list[Pair] = field(default_factory=list)
    reasons: list[Unquantized] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


def plan_pairs(graph: CallGraph, requests: CallRequests, *, sized: bool) -> Pairs:
    """Let the planner place the pairs of a graph. Nothing is changed.

    sized: the graph knows the shapes of a batch as it will be deployed; else every operator is worth its integers.
    """
    config = requests.config
    problem = state_problem(
        graph,
        requests,
        front_end_target(config),
        shapes=graph.shapes,
        closed=lambda node: node.name in graph.closed,
    )
    leaders = _find_leaders(problem)
    choice = choose_ops(problem, attention=config.attention == "quantized", sized=sized)
    placement = Placer(problem, choice.chosen).place()
    reasons = [
        *graph.reasons,
        *choice.reasons,
        *problem.ops.reasons,
        *filter(None, map(problem.engine.without_kernel, graph.nodes)),
    ]
    # The person knows modules, not the nodes that their calls become.
    paths = {node.name: node.path for node in graph.nodes}
    out = Pairs(
        reasons=[
            replace(reason, subject=paths.get(reason.subject, reason.subject)) for reason in reasons
        ]
    )
    out.products = list_products(graph, placement, out.reasons)
    # The planner's order is that of operators; values come in that of the model.
    order = {value: k for k, value in enumerate(graph.values)}
    sites = [
        site
        for site in placement.sites
        if isinstance(site.site, TensorId) and site.site.name in order
    ]
    out.pairs = sorted(
        (_make_activation(graph, site, placement, config) for site in sites),
        key=lambda pair: order[pair.site],
    )
    _share_qparams(out.pairs, placement, leaders)
    for site in placement.sites:
        if site.role.is_weight:
            # One pair for each call that reads the weight.
            out.pairs += [
                _make_weight(graph, site, edge, placement, problem) for edge in site.named_consumers
            ]
    if config.mode == "weight-only" and config.torch.activations.quantizer.name == _DYNAMIC:
        out.pairs = _find_engine_data(graph, placement, problem) + out.pairs
    if config.torch.disable_redundant and find_target(config.target).ideal:
        _disable_redundant(out)
    return out


def _find_quantizer(placement: Placement, site: SitePlan, config: Config) -> QuantizerSpec:
    rule = placement.rules.get(site.site)
    default = config.torch.weights if site.role.is_weight else config.torch.activations
    quantizer = (
        default.quantizer if rule is None or rule.set.quantizer is None else rule.set.quantizer
    )
    if site.role.is_weight or (quantizer.name == _DYNAMIC) is site.spec.dynamic:
        return quantizer
    if site.spec.dynamic and quantizer == QuantizerSpec():
        return QuantizerSpec(_DYNAMIC)
    cause = f"{quantizer.name} in mode {config.mode}: scales either stand in the file or are computed at each run"
    fix = "write `mode: dynamic` or `mode: weight-only` for the quantizer dynamic, `mode: static` for others"
    raise ConfigError(config.where("torch.activations.quantizer"), cause, fix, code="Q307")


def _make_activation(
    graph: CallGraph, site: SitePlan, placement: Placement, config: Config
) -> Pair:
    name = site.quantized_tensor.name
    readers = None
    if site.consumers is not None:
        # An argument may be read by several nodes, and some nodes read no argument of the call.
        arguments = (graph.arguments.get((edge.node, edge.index)) for edge in site.consumers)
        readers = list(dict.fromkeys(filter(None, arguments)))
    return Pair(
        name,
        Role.ACTIVATION,
        site.spec,
        site.observer,
        _find_quantizer(placement, site, config),
        value=graph.values.get(name),
        readers=readers,
        bound=site.bound,
    )


def _make_weight(
    graph: CallGraph, site: SitePlan, edge: Edge, placement: Placement, problem: PlacementProblem
) -> Pair:
    weight = graph.weights[edge.node]
    spec = site.spec
    grain = site.spec.granularity
    # The node of a Linear may read the transposed weight; a quantizer counts torch's axes.
    if weight.transposed and not isinstance(grain, PerTensor):
        spec = replace(spec, granularity=replace(grain, axis=1 - grain.axis))
    return Pair(
        weight.site,
        Role.WEIGHT,
        spec,
        site.observer,
        _find_quantizer(placement, site, problem.config),
        weight=weight,
        value=weight.value,
        readers=None if weight.argument is None else [weight.argument],
        sums=_find_sums(graph, edge, weight, problem),
    )


def _find_engine_data(
    graph: CallGraph, placement: Placement, problem: PlacementProblem
) -> list[Pair]:
    """Data of quantized weights, which an engine quantizes by itself as it multiplies: trained so, and not exported."""
    config = problem.config
    pairs = dict[str, Pair]()
    spec = config.activations.spec(None)
    observer = config.activations.observer
    quantizer = config.torch.activations.quantizer
    options = dict(quantizer.options)
    # MatMulNBits has the same blocks for both.
    if options.get("scales") == "block" and config.weights.block_size is not None:
        options = {"block_size": config.weights.block_size, **options}
        quantizer = QuantizerSpec(quantizer.name, tuple(sorted(options.items())))
    for site in placement.sites:
        for edge in site.named_consumers:
            data, tensor = problem.ops.by_name[edge.node].data[0]
            argument = graph.arguments.get((data.node, data.index))
            value = graph.values.get(tensor.name)
            pair = Pair(
                tensor.name, Role.ACTIVATION, spec, observer, quantizer, value=value, readers=[]
            )
            readers = pairs.setdefault(tensor.name, pair).readers
            if argument is not None and readers is not None and argument not in readers:
                readers.append(argument)
    return list(pairs.values())


def _find_sums(
    graph: CallGraph, edge: Edge, weight: CallWeight, problem: PlacementProblem
) -> Sums | None:
    """The 16-bit sums in which a kernel of the target adds this weight's products with quantized data."""
    op = problem.ops.by_name[edge.node]
    shape = graph.constants[graph.find_node(edge.node).inputs[edge.index]].shape
    order = problem.engine.sum_order(op.node, tuple(shape))
    if order is None or not op.data or problem.config.saturation == "allow":
        return None
    # The order counts the axes that the node reads, a quantizer those of torch.
    return Sums(
        tuple(1 - axis for axis in order) if weight.transposed else order, op.data[0][1].name
    )


def _find_leaders(problem: PlacementProblem) -> list[str]:
    """Sites that the person named as leaders by `follow`. Raises ConfigError where an operator has no such input."""
    sites = []
    for op in problem.ops:
        policy = problem.config.torch.policy(read_call(op.node).op.name)
        if policy is None or policy.policy != "follow" or not op.data:
            continue
        if policy.leader >= len(op.data):
            raise ConfigError(
                problem.config.where("torch.multi_input") / f"follow: {policy.leader}",
                f"{op.name} has {len(op.data)} computed inputs, counted from 0",
                "name one of them",
                code="Q309",
            )
        sites.append(op.data[policy.leader][1].name)
    return sites


def _share_qparams(pairs: list[Pair], placement: Placement, leaders: Iterable[str]) -> None:
    """Pairs that must have one scale follow the first of them, or the one the person named."""
    groups = {
        site.site.name: site.group
        for site in placement.sites
        if isinstance(site.site, TensorId) and site.group
    }
    by_site = {pair.site: pair for pair in pairs}
    named = {groups[site]: by_site[site] for site in leaders if site in groups}
    first: dict[str, Pair] = {}
    for pair in pairs:
        group = groups.get(pair.site)
        if group is None:
            continue
        leader = named.get(group) or first.setdefault(group, pair)
        if leader is not pair:
            # A leader that the person named keeps the range of its own values.
            pair.leader = leader.site
            pair.spec = leader.spec
            pair.contributes = group not in named


def _disable_redundant(out: Pairs) -> None:
    """Quantizers between two operators that run as one kernel are off; the decision is recorded."""
    for pair in out.pairs:
        if (
            pair.value is None
            or pair.role.is_weight
            or is_constant(pair.value)
            or pair.leader is not None
        ):
            continue
        op = read_op(pair.value)
        readers = [read_op(user) for user in pair.value.users]
        if readers and FUSED.get(op, frozenset()).issuperset(readers):
            pair.disabled = f"{op} and {', '.join(dict.fromkeys(readers))} run as one kernel"
            out.decisions.append(Decision(pair.site, pair.disabled, "disable-redundant"))
