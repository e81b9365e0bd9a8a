"""What the person asked for, tensor by tensor: ordered rules over defaults, first match wins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onnxq.config import Config, QuantWish, Rule, did_you_mean, matches
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, NodeRef
from onnxq.sites import Role, TensorId


@dataclass(frozen=True)
class Answer:
    """The wish for one tensor; `rule` is the rule that made it (None: the defaults)."""

    wish: QuantWish
    rule: Rule | None = None

    @property
    def stays_float(self) -> bool:
        return self.rule is not None and self.rule.set.float


@dataclass
class Wishes:
    """Looks rules up by the names in the model as it came and as it is after preparation."""

    config: Config
    index: GraphIndex
    paths: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self.config.rules:
            if rule.between is not None and rule.between not in self.paths:
                self.paths[rule.between] = nodes_between(self.index, *rule.between, rule=rule)

    def answer(self, role: Role, tensor: TensorId, nodes: Sequence[NodeRef]) -> Answer:
        """The first rule that selects this tensor in this role for any of the nodes that make or read it."""
        default = self.config.weights if role is Role.WEIGHT else self.config.activations
        for rule in self.config.rules:
            if any(self._selects(rule, role, tensor, node) for node in nodes):
                return Answer(default if rule.set.float else rule.apply(default), rule)
        return Answer(default)

    def unit(self, node: NodeRef, tensors: Iterable[tuple[Role, TensorId]]) -> Rule | None:
        """The rule that keeps this node float, through itself or through a tensor it cannot do without."""
        for role, tensor in tensors:
            answer = self.answer(role, tensor, (node,))
            if answer.stays_float:
                return answer.rule
        return None

    def forced(self, node: NodeRef, tensors: Iterable[tuple[Role, TensorId]]) -> bool:
        """True when a rule says `quantize: true` for this node."""
        for role, tensor in tensors:
            rule = self.answer(role, tensor, (node,)).rule
            if rule is not None and rule.set.quantize:
                return True
        return False

    def _selects(self, rule: Rule, role: Role | None, tensor: TensorId, node: NodeRef) -> bool:
        if rule.between is not None and node.name not in self.paths[rule.between]:
            return False
        return rule.selects(node=node.name, op=node.op_type, tensor=tensor.name, role=role, scope=node.scope)

    def check_used(self, before: GraphIndex) -> None:
        """Every rule must select something in the model as given or as prepared; else it is a typo."""
        for rule in self.config.rules:
            if not any(_matches_any(rule, index, self.paths) for index in (self.index, before)):
                raise ConfigError(
                    rule.describe(),
                    "matches nothing in this model",
                    _hint(rule, before),
                    code="Q309",
                    file=rule.source,
                    line=rule.line or None,
                )


def _matches_any(rule: Rule, index: GraphIndex, paths: dict[tuple[str, str], frozenset[str]]) -> bool:
    for node in index.nodes:
        if rule.between is not None and node.name not in paths[rule.between]:
            continue
        for tensor in (*node.inputs, *node.outputs):
            if tensor and rule.selects(
                node=node.name,
                op=node.op_type,
                tensor=tensor,
                role=rule.role[0] if rule.role else None,
                scope=node.scope,
            ):
                return True
    return False


def _hint(rule: Rule, index: GraphIndex) -> str:
    """The nearest names for the first selector that no name in the model satisfies."""
    known = {
        "node": {node.name for node in index.nodes},
        "op": {node.op_type for node in index.nodes},
        "tensor": {name for node in index.nodes for name in (*node.inputs, *node.outputs) if name},
        "scope": set(index.scopes),
    }
    for key, names in known.items():
        patterns = getattr(rule, key)
        if patterns and not any(matches(patterns, name) for name in names):
            return f"{key} {patterns[0]!r}: {did_you_mean(patterns[0].strip('/*'), names)}"
    return "each selector matches something, but never on one node: loosen one of them"


def nodes_between(index: GraphIndex, first: str, last: str, *, rule: Rule) -> frozenset[str]:
    """Nodes on a path from `first` to `last` (tensor or node names), both ends included."""
    after = _walk(index, _ends(index, first, rule), forward=True)
    before = _walk(index, _ends(index, last, rule), forward=False)
    found = frozenset(after & before)
    if not found:
        raise ConfigError(
            rule.describe(),
            f"no path leads from {first!r} to {last!r}",
            "swap them, or name nodes on one path",
            code="Q314",
            file=rule.source,
            line=rule.line or None,
        )
    return found


def _ends(index: GraphIndex, name: str, rule: Rule) -> list[NodeRef]:
    by_node = [node for node in index.nodes if node.name == name]
    if by_node:
        return by_node
    touching = [node for node in index.nodes if name in node.outputs]
    touching = touching or [node for node in index.nodes if name in node.inputs]
    if not touching:
        names = {node.name for node in index.nodes} | {out for node in index.nodes for out in node.outputs}
        raise ConfigError(
            rule.describe(),
            f"no node or tensor is called {name!r}",
            did_you_mean(name, names),
            code="Q314",
            file=rule.source,
            line=rule.line or None,
        )
    return touching


def _walk(index: GraphIndex, start: list[NodeRef], *, forward: bool) -> set[str]:
    seen = {node.name for node in start}
    pending = list(start)
    while pending:
        for node in _neighbours(index, pending.pop(), forward):
            if node.name not in seen:
                seen.add(node.name)
                pending.append(node)
    return seen


def _neighbours(index: GraphIndex, node: NodeRef, forward: bool) -> list[NodeRef]:
    if forward:
        edges = [edge for out in node.outputs if out for edge in index.consumers(TensorId(out, node.scope))]
        return [index.node(edge.node) for edge in edges]
    found = []
    for name in node.inputs:
        tensor = index.resolve(name, node.scope) if name else None
        producer = None if tensor is None else index.producer(tensor)
        if producer is not None:
            found.append(producer)
    return found
