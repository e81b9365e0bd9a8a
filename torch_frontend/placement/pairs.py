"""The planner's sites as quantizers of a torch module: which value, which arguments, whose numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx, nn

from onnxq.config import Config, MultiInput, QuantizerSpec
from onnxq.errors import ConfigError
from onnxq.graph import NodeRef
from onnxq.numerics import SumOrder
from onnxq.plan import Bound, SitePlan
from onnxq.planner.choose import choose_ops
from onnxq.planner.place import Placement, Placer
from onnxq.planner.problem import PlacementProblem, state_problem
from onnxq.sites import Edge, Role, TensorId, Unquantized
from onnxq.spec import ObserverSpec, PerTensor, QuantSpec
from torch_frontend.placement.graph import Argument, CallGraph, CallNode, Weight
from torch_frontend.placement.rules import FUSED, CallRequests, front_end_target
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing import is_constant, read_name


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

    leader: the site whose numbers it uses; its own name when it has its own. contributes: values here count for
    the leader's range. bound: of a fused activation in front; quantized values keep inside it, so that the engine can
    drop the activation. sums: which of a weight's may not overflow.
    """

    site: str
    role: Role
    spec: QuantSpec
    observer: ObserverSpec
    quantizer: QuantizerSpec
    value: fx.Node | None = None
    weight: Weight | None = None
    readers: list[Argument] | None = None
    leader: str = ""
    contributes: bool = True
    disabled: str | None = None
    bound: Bound = (None, None)
    sums: tuple[Sums, ...] = ()


@dataclass
class Pairs:
    """The quantizers of a whole graph, activations in its order, then weights; and why the rest stays float."""

    pairs: list[Pair] = field(default_factory=list)
    reasons: list[Unquantized] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


def plan_pairs(graph: CallGraph, requests: CallRequests, *, sized: bool) -> Pairs:
    """Let the planner place the pairs of a graph. Nothing is changed.

    sized: the graph knows the shapes of a batch as it will be deployed; else every operator is worth its integers.
    """
    config = requests.config
    problem = state_problem(
        graph, requests, front_end_target(config), shapes=graph.shapes, closed=lambda node: node.name in graph.closed
    )
    _check_leaders(problem)
    choice = choose_ops(problem, attention=config.attention == "quantized", sized=sized)
    placement = Placer(problem).place(choice.chosen)
    kernels = (problem.engine.without_kernel(node.name, node.op_type) for node in graph.nodes)
    reasons = [*graph.reasons, *choice.reasons, *problem.ops.reasons, *(one for one in kernels if one is not None)]
    paths = {node.name: node.path for node in graph.nodes if isinstance(node, CallNode)}
    out = Pairs(reasons=[replace(one, subject=paths.get(one.subject, one.subject)) for one in reasons])
    order = {value: k for k, value in enumerate(graph.values)}
    activations = [_make_activation(graph, site, placement, config) for site in placement.sites
                   if isinstance(site.site, TensorId) and site.site.name in order]  # fmt: skip
    out.pairs = sorted(activations, key=lambda pair: order[pair.site])
    _share_numbers(out.pairs, placement, problem)
    for site in placement.sites:
        if site.role is Role.WEIGHT:
            out.pairs += _make_weights(graph, site, placement, problem)
    if config.torch.disable_redundant and config.target == "virtual":
        _disable_redundant(out)
    return out


def _find_quantizer(placement: Placement, site: SitePlan, config: Config) -> QuantizerSpec:
    rule = placement.rules.get(site.site)
    default = config.torch.weights if site.role is Role.WEIGHT else config.torch.activations
    return default.quantizer if rule is None or rule.set.quantizer is None else rule.set.quantizer


def _make_activation(graph: CallGraph, site: SitePlan, placement: Placement, config: Config) -> Pair:
    assert isinstance(site.site, TensorId)
    name = site.site.name
    arguments = None
    if site.consumers is not None:
        found = (graph.arguments.get((edge.node, edge.index)) for edge in site.consumers)
        arguments = list(dict.fromkeys(argument for argument in found if argument is not None))
    return Pair(
        name, Role.ACTIVATION, site.spec, site.observer, _find_quantizer(placement, site, config),
        value=graph.values.get(name), readers=arguments, leader=name, bound=site.bound,
    )  # fmt: skip


def _make_weights(graph: CallGraph, site: SitePlan, placement: Placement, problem: PlacementProblem) -> list[Pair]:
    """One pair for each call that reads the weight."""
    made = []
    for edge in site.consumers or ():
        weight = graph.weights[edge.node]
        made.append(Pair(
            weight.site, Role.WEIGHT, _turn_axis(site.spec, weight), site.observer,
            _find_quantizer(placement, site, problem.config), weight=weight, value=weight.value,
            readers=None if weight.argument is None else [weight.argument], leader=weight.site,
            sums=_find_sums(graph, edge, weight, problem),
        ))  # fmt: skip
    return made


def _turn_axis(spec: QuantSpec, weight: Weight) -> QuantSpec:
    """The spec along torch's axes: the node of a Linear may read the transposed weight."""
    grain = spec.granularity
    if not weight.turned or isinstance(grain, PerTensor):
        return spec
    return replace(spec, granularity=replace(grain, axis=1 - grain.axis))


def _find_sums(graph: CallGraph, edge: Edge, weight: Weight, problem: PlacementProblem) -> tuple[Sums, ...]:
    """The 16-bit sums in which a kernel of the target adds this weight's products with quantized data."""
    unit, shape = problem.ops.by_name[edge.node], graph.constants[graph.node(edge.node).inputs[edge.index]].shape
    order = problem.engine.sum_order(unit.node, tuple(shape))
    if order is None or not unit.data or problem.config.saturation == "allow":
        return ()
    return (Sums(tuple(1 - axis for axis in order) if weight.turned else order, unit.data[0][1].name),)


def _share_numbers(pairs: list[Pair], placement: Placement, problem: PlacementProblem) -> None:
    """Pairs that must have one scale follow the first of them, or the one the person named."""
    groups = {site.site.name: site.group for site in placement.sites if isinstance(site.site, TensorId) and site.group}
    leads: dict[str, str] = {}
    for unit in problem.ops:
        policy = _find_policy(problem.config, unit.node)
        named_lead = unit.data[policy.leader][1].name if policy is not None and policy.policy == "follow" else ""
        if named_lead in groups:
            leads[groups[named_lead]] = named_lead
    by_site = {pair.site: pair for pair in pairs}
    first: dict[str, Pair] = {}
    for pair in pairs:
        group = groups.get(pair.site)
        if group is None:
            continue
        leader = by_site[leads[group]] if group in leads else first.setdefault(group, pair)
        pair.leader, pair.spec = leader.site, leader.spec
        pair.contributes = pair is leader or group not in leads


def _find_policy(config: Config, node: NodeRef) -> MultiInput | None:
    return config.torch.policy(node.op.name) if isinstance(node, CallNode) and node.op is not None else None


def _check_leaders(problem: PlacementProblem) -> None:
    """ConfigError for a `follow` that names an input which an operator does not have."""
    for unit in problem.ops:
        policy = _find_policy(problem.config, unit.node)
        if policy is not None and policy.policy == "follow" and unit.data and policy.leader >= len(unit.data):
            raise ConfigError(
                problem.config.where("torch.multi_input") / f"follow: {policy.leader}",
                f"{unit.name} has {len(unit.data)} computed inputs, counted from 0",
                "name one of them",
                code="Q309",
            )


def _disable_redundant(out: Pairs) -> None:
    """Quantizers between two operators that run as one kernel are off; the decision is recorded."""
    for pair in out.pairs:
        if pair.value is None or pair.role is Role.WEIGHT or is_constant(pair.value):
            continue
        behind, users = FUSED.get(_find_op(pair.value)), list(pair.value.users)
        if behind is None or not users or pair.leader != pair.site:
            continue
        ops = [_find_op(user) for user in users]
        if behind.issuperset(ops):
            pair.disabled = f"{_find_op(pair.value)} and {', '.join(dict.fromkeys(ops))} run as one kernel"
            out.decisions.append(Decision(pair.site, pair.disabled, "disable-redundant"))


def _find_op(node: fx.Node) -> str:
    name = read_name(node)
    return "" if name is None or name.entry is None else name.entry.op.name


def bind_sums(
    pairs: Iterable[Pair], activations: Mapping[str, Quantizer], find_weight: Callable[[Pair], nn.Module]
) -> None:
    """Let the quantizers of weights keep the sums of the target's kernels, while those of the data are on."""
    for pair in pairs:
        for sums in pair.sums:
            weight = find_weight(pair)
            if sums.data in activations and isinstance(weight, Quantizer):
                weight.bind_sums(sums.order, activations[sums.data])
