"""Which tensors get a quantizer, who reads it, and which share their numbers: decided here, carried out by `attach`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from onnxq.config import Config, QuantizerSpec
from onnxq.errors import OnnxqError
from onnxq.plan import Bound
from onnxq.planner.place import tightest
from onnxq.sites import LeftFloat, Refusal, Role, Unquantized
from onnxq.spec import ObserverSpec, QuantSpec
from onnxq.targets import Output, describe, target
from torch_frontend.quant_model.keep import cut_for_attention, kept_float, opt_in, weighs_values
from torch_frontend.quant_model.places import REDUNDANT
from torch_frontend.quant_model.residual import backbone, op_of
from torch_frontend.quant_model.slots import Slot
from torch_frontend.quant_model.units import Found, Unit, Weight, asker_of
from torch_frontend.quant_model.wishes import Answer, Wishes
from torch_frontend.tracing import is_constant, is_float, named, site_of

Edge = tuple[fx.Node, Slot]


@dataclass(frozen=True)
class Decision:
    """What a pass changed: a quantizer switched off, a batch norm folded or not. subject: site or module."""

    subject: str
    reason: str
    rule: str


@dataclass(eq=False)
class Pair:
    """One quantizer to be. readers: the arguments that get the quantized value; None: all of them.

    leader: the site whose numbers it uses; its own name when it has its own. contributes: what passes here counts for
    the leader's range. bound: what a fused activation in front promises; levels keep inside it, so that the engine can
    drop the activation.
    """

    site: str
    role: Role
    spec: QuantSpec
    observer: ObserverSpec
    quantizer: QuantizerSpec
    value: fx.Node | None = None
    weight: Weight | None = None
    readers: list[Edge] | None = None
    leader: str = ""
    contributes: bool = True
    disabled: str | None = None
    bound: Bound = (None, None)


@dataclass
class Draft:
    """The decision for a whole graph."""

    pairs: list[Pair] = field(default_factory=list)
    reasons: list[Unquantized] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    float_units: set[str] = field(default_factory=set)


def draft(
    graph: fx.Graph, found: Found, config: Config, wishes: Wishes, shapes: Mapping[str, tuple[int, ...]]
) -> Draft:
    """Decide for every tensor of the graph. Nothing is changed. shapes: parameter -> its shape."""
    out = Draft(reasons=list(found.reasons))
    chosen = _chosen(found, config, wishes, shapes, out)
    readers = _readers(found, chosen, config, wishes)
    order = {node: k for k, node in enumerate(graph.nodes)}
    for value in sorted(readers, key=order.__getitem__):
        out.pairs.append(_activation(value, readers[value], found, chosen, wishes))
    _group(out, found, chosen, readers)
    for unit in found.units:
        if unit.node in chosen and unit.weight is not None:
            pair = _weight(unit, unit.weight, wishes)
            if pair is not None:
                out.pairs.append(pair)
    if config.torch.disable_redundant:
        _disable(out)
    return out


def _spec(answer: Answer, unit: Unit, role: Role) -> QuantSpec:
    assert unit.name.entry is not None
    if role is Role.WEIGHT and unit.weight is not None:
        blocked = answer.wish.granularity == "block"
        return answer.wish.spec(unit.weight.block_axis if blocked else unit.weight.axis)
    return answer.wish.spec(unit.name.entry.op.channel)


def _sites(unit: Unit) -> Iterable[tuple[Role, str]]:
    for _, value in unit.data:
        yield Role.ACTIVATION, site_of(value) or ""
    if unit.weight is not None:
        yield Role.WEIGHT, unit.weight.site


def _chosen(
    found: Found, config: Config, wishes: Wishes, shapes: Mapping[str, tuple[int, ...]], out: Draft
) -> set[fx.Node]:
    """Compute units that nobody wants float, then the followers between them."""
    chosen, candidates = set(), []
    for unit in found.units:
        reason = _unwanted(unit, config, wishes)
        if reason is None and config.mode != "weight-only" and not _forced(unit, wishes):
            reason = kept_float(found, unit, config.target, shapes)
        if reason is not None:
            if unit.place.compute or reason.rule == "configuration":
                out.reasons.append(reason)
        elif unit.place.compute:
            chosen.add(unit.node)
        else:
            candidates.append(unit)
    if config.mode == "weight-only":
        return chosen
    for unit in [unit for unit in candidates if unit.place.inputs == "skip"]:
        ends = [backbone(value) for value in unit.node.all_input_nodes]
        if any(end in chosen for end in ends if end is not None):
            chosen.add(unit.node)
    _follow(found, [u for u in candidates if not u.place.joins and u.place.inputs != "skip"], chosen)
    return chosen


def _unwanted(unit: Unit, config: Config, wishes: Wishes) -> Unquantized | None:
    """Why this unit stays float: a rule, what the target cannot hold, what must be asked for; or None."""
    engine = target(config.target, config.mode)
    if unit.place.attention and not _forced(unit, wishes) and (reason := opt_in(unit, config)) is not None:
        return reason
    floats = []
    for role, site in _sites(unit):
        if role is Role.ACTIVATION and config.mode == "weight-only":
            continue
        answer = wishes.answer(role, site, [unit.asker])
        if answer.stays_float and answer.rule is not None:
            floats.append((role, answer.rule.describe()))
            continue
        refusal = _unheld(unit, role, answer, config)
        if refusal is not None:
            return refusal
    total = len([1 for role, _ in _sites(unit) if role is Role.WEIGHT or config.mode != "weight-only"])
    if floats and (len(floats) == total or engine.name != "virtual"):
        return LeftFloat(unit.name.path, f"left float by {floats[0][1]}", "configuration", "F101")
    return None


def _forced(unit: Unit, wishes: Wishes) -> bool:
    return any(wishes.forced(role, site, unit.asker) for role, site in _sites(unit))


def _unheld(unit: Unit, role: Role, answer: Answer, config: Config) -> Refusal | None:
    assert unit.name.entry is not None
    engine = target(config.target, config.mode)
    try:
        spec = _spec(answer, unit, role)
    except OnnxqError as error:
        return Refusal(unit.name.path, f"{error.subject}: {error.cause}", error.fix, "spec", "R103")
    ops = unit.name.entry.op.onnx or ("",)
    if any(engine.capability(spec, role, op) is not None for op in ops):
        return None
    return Refusal(
        unit.name.path,
        f"{engine.name} has no {ops[0]} kernel for {describe(spec)} {role}s",
        "see docs/config.md",
        "spec",
        "R103",
    )


def _follow(found: Found, candidates: list[Unit], chosen: set[fx.Node]) -> None:
    """Keep the followers whose inputs are quantized anyway and whose result a chosen unit reads."""
    chosen |= {unit.node for unit in candidates}
    changed = True
    while changed:
        changed = False
        for unit in candidates:
            if unit.node in chosen and not (_fed(found, unit, chosen) and _read(found, unit, chosen)):
                chosen.discard(unit.node)
                changed = True


def _fed(found: Found, unit: Unit, chosen: set[fx.Node]) -> bool:
    for _, value in unit.data:
        maker = found.by_out.get(value)
        if maker is None or maker.node not in chosen or maker.place.output is Output.FLOAT:
            return False
    return bool(unit.data)


def _read(found: Found, unit: Unit, chosen: set[fx.Node]) -> bool:
    for reader in unit.out.users:
        other = found.by_node.get(reader)
        if other is not None and other.node in chosen and any(value is unit.out for _, value in other.data):
            return True
    return False


def _readers(found: Found, chosen: set[fx.Node], config: Config, wishes: Wishes) -> dict[fx.Node, list[Edge] | None]:
    """Values with a pair -> the arguments that read it; None when it stands at the producer, for all."""
    if config.mode == "weight-only":
        return {}
    out: dict[fx.Node, list[Edge] | None] = {}
    closed: list[fx.Node] = []
    for unit in found.units:
        if unit.node not in chosen:
            continue
        for slot, value in unit.data:
            if unit.place.joins or _left_float(unit, value, wishes):
                continue
            edges = out.setdefault(value, [])
            assert edges is not None
            edges.append((unit.node, slot))
        cut = unit.place.cut and cut_for_attention(unit.node)
        cut = cut or (unit.place.attention and weighs_values(unit.node))
        if is_float(unit.out) and (cut or unit.place.output is Output.PAIR):
            closed.append(unit.out)
    return {**out, **dict.fromkeys(closed)}


def _left_float(unit: Unit, value: fx.Node, wishes: Wishes) -> bool:
    return wishes.answer(Role.ACTIVATION, site_of(value) or "", [unit.asker]).stays_float


def _activation(value: fx.Node, edges: list[Edge] | None, found: Found, chosen: set[fx.Node], wishes: Wishes) -> Pair:
    site = site_of(value) or ""
    maker = found.by_out.get(value)
    if edges is None:
        near = [found.by_node[r] for r in value.users if r in found.by_node and r in chosen]
    else:
        near = [found.by_node[node] for node, _ in edges]
    makers = [maker] if maker is not None and maker.node in chosen else []
    askers = [unit.asker for unit in (*near, *makers)]
    if not makers and (name := named(value)) is not None:
        askers.append(asker_of(name))
    answer = wishes.answer(Role.ACTIVATION, site, askers)
    unit = (*near, *makers)[0]
    spec = _spec(answer, unit, Role.ACTIVATION)
    return Pair(
        site,
        Role.ACTIVATION,
        spec,
        answer.wish.observer,
        answer.quantizer,
        value=value,
        readers=edges,
        leader=site,
        bound=makers[0].bound if makers else (None, None),
    )


def _weight(unit: Unit, weight: Weight, wishes: Wishes) -> Pair | None:
    answer = wishes.answer(Role.WEIGHT, weight.site, [unit.asker])
    if answer.stays_float:
        return None
    edges = [(weight.reader, weight.slot)] if weight.slot is not None and weight.reader is not None else None
    return Pair(
        weight.site, Role.WEIGHT, _spec(answer, unit, Role.WEIGHT), answer.wish.observer, answer.quantizer,
        weight=weight, value=weight.value, readers=edges, leader=weight.site,
    )  # fmt: skip


def _group(out: Draft, found: Found, chosen: set[fx.Node], readers: dict[fx.Node, list[Edge] | None]) -> None:
    """Pairs that must have one scale follow the first of them, or the one the person named."""
    pairs = {pair.value: pair for pair in out.pairs if pair.value is not None}
    root: dict[fx.Node, fx.Node] = {}
    leads: dict[fx.Node, fx.Node] = {}

    def find(value: fx.Node) -> fx.Node:
        while root.get(value, value) is not value:
            value = root[value]
        return value

    def join(values: list[fx.Node]) -> None:
        inside = [value for value in values if value in pairs]
        for value in inside[1:]:
            if find(value) is not find(inside[0]):
                root[find(value)] = find(inside[0])

    for unit in found.units:
        asked = unit.policy.policy if unit.policy is not None else ""
        moves = unit.name.entry is not None and unit.name.entry.op.moves
        sharing = unit.place.shares if not asked else asked in ("share", "follow")
        if not sharing or (unit.node not in chosen and not unit.place.joins):
            continue
        values = [value for _, value in unit.data]
        join([*values, unit.out] if moves else values)
        if asked == "follow" and unit.policy is not None and values:
            leads[find(values[0])] = values[unit.policy.leader]
    members: dict[fx.Node, list[Pair]] = {}
    for value, pair in pairs.items():
        members.setdefault(find(value), []).append(pair)
    for top, group in members.items():
        named_leader = next((lead for old, lead in leads.items() if find(old) is top), None)
        first = pairs[named_leader] if named_leader in pairs else group[0]
        first.bound = tightest(pair.bound for pair in group)
        for pair in group:
            pair.leader = first.site
            pair.spec = first.spec
            pair.contributes = pair is first or named_leader is None


def _disable(out: Draft) -> None:
    """Quantizers between two operators that run as one kernel are off; the decision is recorded."""
    for pair in out.pairs:
        if pair.value is None or pair.role is Role.WEIGHT or is_constant(pair.value):
            continue
        behind = REDUNDANT.get(op_of(pair.value))
        users = list(pair.value.users)
        if behind is None or not users or pair.leader != pair.site:
            continue
        if all(op_of(user) in behind for user in users):
            ops = ", ".join(dict.fromkeys(op_of(user) for user in users))
            pair.disabled = f"{op_of(pair.value)} and {ops} run as one kernel"
            out.decisions.append(Decision(pair.site, pair.disabled, "disable-redundant"))
