"""What the configuration asks for each site: defaults, changed by the first rule that matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from onnxq.config import Config, QuantizerSpec, QuantWish, Rule, did_you_mean, matches
from onnxq.errors import ConfigError
from onnxq.sites import Role
from torch_frontend.tracing import named, site_of


@dataclass(frozen=True)
class Asker:
    """A call that makes or reads a tensor, as rules may name it. ops: its operator in torch's and ONNX's words."""

    path: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The wish for a site, the quantizer for it, and the rule behind them (None: the defaults)."""

    wish: QuantWish
    quantizer: QuantizerSpec
    rule: Rule | None = None

    @property
    def stays_float(self) -> bool:
        """True when the rule says so."""
        return self.rule is not None and self.rule.set.float


@dataclass
class Wishes:
    """Looks rules up; `node` patterns are held against module paths, `tensor` patterns against sites."""

    config: Config
    paths: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def find_paths(self, graph: fx.Graph) -> None:
        """Look up what `between` rules select. Raises ConfigError for ends that are not there or not connected."""
        for rule in self.config.rules:
            if rule.between is not None and rule.between not in self.paths:
                self.paths[rule.between] = calls_between(graph, *rule.between, rule=rule)

    def answer(self, role: Role, site: str, askers: Sequence[Asker]) -> Answer:
        """The first rule that selects this site in this role for any of the calls that make or read it."""
        front = self.config.torch
        wish = self.config.weights if role is Role.WEIGHT else self.config.activations
        quantizer = (front.weights if role is Role.WEIGHT else front.activations).quantizer
        for k, rule in enumerate(self.config.rules):
            if any(self._selects(rule, role, site, asker) for asker in askers):
                self.used.add(k)
                if rule.set.float:
                    return Answer(wish, quantizer, rule)
                return Answer(rule.apply(wish), rule.set.quantizer or quantizer, rule)
        return Answer(wish, quantizer)

    def forced(self, role: Role, site: str, asker: Asker) -> bool:
        """True when a rule says `quantize: true` for this call."""
        rule = self.answer(role, site, [asker]).rule
        return rule is not None and rule.set.quantize

    def _selects(self, rule: Rule, role: Role, site: str, asker: Asker) -> bool:
        if rule.between is not None and asker.path not in self.paths.get(rule.between, frozenset()):
            return False
        return any(rule.selects(node=asker.path, op=op, tensor=site, role=role) for op in asker.ops)

    def check_used(self, askers: Iterable[Asker], sites: Iterable[str]) -> None:
        """Raise ConfigError for a rule that matches nothing in the model: it is a typo."""
        known, tensors = list(askers), list(sites)
        for k, rule in enumerate(self.config.rules):
            if k not in self.used and not _could_match(rule, known, tensors, self.paths):
                raise ConfigError(
                    rule.describe(),
                    "matches nothing in this model",
                    _hint(rule, known, tensors),
                    code="Q309",
                    file=rule.source,
                    line=rule.line or None,
                )


def calls_between(graph: fx.Graph, first: str, last: str, *, rule: Rule) -> frozenset[str]:
    """Module paths on a way from `first` to `last` (paths or sites), both ends included."""
    behind = _walk(_ends(graph, first, rule), lambda node: list(node.users))
    before = _walk(_ends(graph, last, rule), lambda node: node.all_input_nodes)
    found = frozenset(name.path for node in behind & before if (name := named(node)) is not None)
    if not found:
        raise ConfigError(
            rule.describe(),
            f"no path leads from {first!r} to {last!r}",
            "swap them, or name calls on one path",
            code="Q314",
            file=rule.source,
            line=rule.line or None,
        )
    return found


def _ends(graph: fx.Graph, wanted: str, rule: Rule) -> list[fx.Node]:
    names: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        name = named(node)
        for word in {site_of(node), *((name.path, name.name) if name is not None else ())} - {None}:
            names.setdefault(str(word), []).append(node)
    if wanted not in names:
        raise ConfigError(
            rule.describe(),
            f"no module or site is called {wanted!r}",
            did_you_mean(wanted, names),
            code="Q314",
            file=rule.source,
            line=rule.line or None,
        )
    return names[wanted]


def _walk(start: list[fx.Node], following: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    seen, pending = set(start), list(start)
    while pending:
        for node in following(pending.pop()):
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def _could_match(
    rule: Rule, askers: list[Asker], sites: list[str], paths: dict[tuple[str, str], frozenset[str]]
) -> bool:
    """True when its names are the model's: it may select what other reasons leave float."""
    if rule.between is not None and not paths.get(rule.between):
        return False
    nodes = any(matches(rule.node, a.path) and any(matches(rule.op, op) for op in a.ops) for a in askers)
    return nodes and any(matches(rule.tensor, site) for site in sites)


def _hint(rule: Rule, askers: list[Asker], sites: list[str]) -> str:
    known = {"node": {a.path for a in askers}, "op": {op for a in askers for op in a.ops}, "tensor": set(sites)}
    for key, names in known.items():
        patterns = getattr(rule, key)
        if patterns and not any(matches(patterns, name) for name in names):
            return f"{key} {patterns[0]!r}: {did_you_mean(patterns[0].strip('/*'), names)}"
    return "each selector matches something, but never on one module: loosen one of them"
