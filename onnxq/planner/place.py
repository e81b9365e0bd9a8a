"""From chosen units to sites: which tensors get a pair, who reads it, with which spec, sharing and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from onnxq.config import Rule
from onnxq.graph import NodeRef
from onnxq.plan import Bound, SitePlan
from onnxq.planner.operators import QuantizableOp
from onnxq.planner.problem import PlacementProblem
from onnxq.planner.requests import Match
from onnxq.sites import Caution, Edge, Role, Site, TensorId
from onnxq.spec import Granularity, PerChannel, PerTensor, QuantSpec
from onnxq.targets import Output, describe_spec


@dataclass
class Placement:
    """Sites in topological order, the opset they need and the warnings.

    existing: every pair that the model came with, with those that read it from now on among its consumers.
    rules: the person's rule behind each new site that has one.
    """

    sites: list[SitePlan] = field(default_factory=list)
    existing: list[SitePlan] = field(default_factory=list)
    warnings: list[Caution] = field(default_factory=list)
    opset: int = 13
    rules: dict[Site, Rule] = field(default_factory=dict)


class Placer:
    """Builds the sites of one choice of units."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.units, self.requests = problem.units, problem.requests
        self.target, self.config = problem.engine, problem.config
        self.index = self.units.index
        self.out = Placement()
        self.shared: dict[Site, SitePlan] = {site.site: site for site in self.units.existing.sites}

    def place(self, chosen: frozenset[str]) -> Placement:
        """All sites of the chosen units. QuantizableOps that the model's own pairs quantize already need none."""
        chosen = chosen | self.units.complete
        picked = [unit for unit in self.units.units if unit.name in chosen]
        activations = {} if self.config.mode == "weight-only" else self._activations(picked, chosen)
        done: dict[Site, SitePlan] = {}
        new = [unit for unit in picked if unit.name not in self.units.complete]
        for unit in new:
            for site in self._unit_sites(unit, chosen, activations):
                done.setdefault(site.site, site)
        sites = share_scales(new, [self.shared.get(name, site) for name, site in done.items()])
        frozen = {site.site: site for site in sites if site.dequantize}
        self.out.existing = [frozen.get(site.site, site) for site in self.shared.values()]
        self.out.sites = [_adopt_existing(site, frozen) for site in sites if not site.dequantize]
        self.out.warnings += [line for line in find_unused_observers(self.out.sites) if line not in self.out.warnings]
        return self.out

    def _activations(
        self, picked: list[QuantizableOp], chosen: frozenset[str]
    ) -> dict[TensorId, tuple[Edge, ...] | None]:
        """Tensors with a pair -> the edges that read it; None when the pair sits at an int8 producer."""
        found: dict[TensorId, tuple[Edge, ...] | None] = {}
        for unit in picked:
            for _, tensor in () if unit.rule.joins else unit.data:
                if tensor not in found:
                    found[tensor] = self._readers(tensor, chosen)
            if unit.rule.output is Output.PAIR or self._needs_output_pair(unit):
                found[unit.out] = None
        return found

    def _needs_output_pair(self, unit: QuantizableOp) -> bool:
        """A Gemm writes float only from an int32 bias."""
        without_bias = unit.bias is None or self.config.bias == "float"
        return unit.rule.output is Output.EITHER and without_bias

    def _readers(self, tensor: TensorId, chosen: frozenset[str]) -> tuple[Edge, ...] | None:
        maker = self.units.by_out.get(tensor)
        if maker is not None and maker.name in chosen and maker.rule.output is not Output.FLOAT:
            return None
        return self._find_quantized_readers(tensor, chosen)

    def _find_quantized_readers(self, tensor: TensorId, chosen: frozenset[str]) -> tuple[Edge, ...]:
        readers = self.units.consumers(tensor)
        return tuple(edge for edge, unit in readers if unit is not None and unit.name in chosen)

    def _unit_sites(
        self, unit: QuantizableOp, chosen: frozenset[str], activations: dict[TensorId, tuple[Edge, ...] | None]
    ) -> Iterable[SitePlan]:
        inputs: list[SitePlan] = []
        if self.config.mode != "weight-only":
            wanted = [pair for pair in unit.data if pair[1] in activations]
            inputs = [self._activation(unit, edge, tensor, activations[tensor], chosen) for edge, tensor in wanted]
            yield from inputs
        weight = None
        if unit.weight is not None:
            weight = self._weight(unit, unit.weight, chosen)
            yield weight
        if unit.bias is not None and weight is not None and inputs and self.config.bias == "int32":
            yield self._bias(unit, unit.bias, inputs[0], weight)
        if unit.out in activations and activations[unit.out] is None:
            yield self._activation(unit, None, unit.out, None, chosen)

    def _activation(
        self,
        unit: QuantizableOp,
        edge: Edge | None,
        tensor: TensorId,
        readers: tuple[Edge, ...] | None,
        chosen: frozenset[str],
    ) -> SitePlan:
        """The pair of a tensor; inside a body that captures it, a pair of its own for each reader."""
        maker = self.units.by_out.get(tensor)
        pair = self.units.existing.pair_for(edge, tensor)
        if pair is not None:
            return self._share(pair, tensor, readers)
        nodes = [unit.node] + ([maker.node] if maker is not None and maker is not unit else [])
        # A pair that its maker's kernel writes is read like any other, so rules for its readers hold too.
        nodes += [self.index.node(reader.node) for reader in self._find_quantized_readers(tensor, chosen)]
        match = self.requests.match(Role.ACTIVATION, tensor, nodes)
        spec = self.requests.make_spec(match, Role.ACTIVATION, unit.node)
        self._note(spec, Role.ACTIVATION, unit.node)
        captured = edge is not None and edge.scope != tensor.scope
        site: Site = tensor
        if captured and edge is not None:
            site, readers = edge, (edge,)
        elif readers is not None:
            readers = tuple(reader for reader in readers if reader.scope == tensor.scope)
        self._note_rule(site, match)
        is_output = tensor.scope == "" and self.index.is_output(tensor) and readers is None
        return SitePlan(
            site=site,
            role=Role.OUTPUT if is_output else Role.ACTIVATION,
            spec=spec,
            observer=match.request.observer,
            rule=unit.rule.name,
            reason=_explain_rule(unit.rule.why, match, spec),
            consumers=readers,
            bound=maker.bound if maker is not None else (None, None),
            tensor=tensor,
        )

    def _share(self, pair: SitePlan, tensor: TensorId, readers: tuple[Edge, ...] | None) -> SitePlan:
        """The pair that the model came with, read by these inputs too; readers None: by all that read the tensor."""
        if readers is None:
            readers = self.index.consumers(tensor)
        existing = self.units.existing
        mine = [edge for edge in readers if edge.scope == pair.site.scope and edge.node not in existing.stand_ins]
        mine = [edge for edge in mine if existing.by_edge.get(edge, pair).site == pair.site]
        now = self.shared[pair.site]
        now = replace(now, consumers=tuple(dict.fromkeys((*(now.consumers or ()), *mine))))
        self.shared[pair.site] = now
        return now

    def _weight(self, unit: QuantizableOp, edge: Edge, chosen: frozenset[str]) -> SitePlan:
        """The weight's site: the tensor itself, or the edge when its readers need different copies."""
        tensor = self.index.resolve(unit.node.inputs[edge.index], unit.node.scope)
        assert tensor is not None
        match = self.requests.match(Role.WEIGHT, tensor, (unit.node,))
        spec = self.requests.make_spec(match, Role.WEIGHT, unit.node)
        self._note(spec, Role.WEIGHT, unit.node)
        mine: list[Edge] = []
        alike = tensor.scope == unit.node.scope
        for reader in self.index.consumers(tensor):
            other = self.units.by_name.get(reader.node)
            if other is None or other.name not in chosen or other.weight != reader:
                continue
            mine.append(reader)
            theirs = self.requests.match(Role.WEIGHT, tensor, (other.node,))
            alike = alike and self.requests.make_spec(theirs, Role.WEIGHT, other.node) == spec
            alike = alike and reader.scope == tensor.scope
        site: Site = tensor if alike else edge
        self._note_rule(site, match)
        return SitePlan(
            site=site,
            role=Role.WEIGHT,
            spec=spec,
            observer=match.request.observer,
            rule=unit.rule.name,
            reason=_explain_rule(unit.rule.why, match, spec),
            consumers=tuple(mine) if alike else (edge,),
            tensor=tensor,
        )

    def _bias(self, unit: QuantizableOp, edge: Edge, activation: SitePlan, weight: SitePlan) -> SitePlan:
        tensor = self.index.resolve(unit.node.inputs[edge.index], unit.node.scope)
        assert tensor is not None
        alone = self.index.consumers(tensor) == (edge,) and tensor.scope == edge.scope
        return SitePlan(
            site=tensor if alone else edge,
            role=Role.BIAS,
            spec=QuantSpec(bits=32, signed=True, symmetric=True, granularity=_find_bias_granularity(weight.spec)),
            rule=unit.rule.name,
            reason="int32 bias in units of the accumulator: input scale times weight scale",
            consumers=(edge,),
            derived=(activation.site, weight.site),
            tensor=tensor,
        )

    def _note_rule(self, site: Site, match: Match) -> None:
        if match.rule is not None:
            self.out.rules.setdefault(site, match.rule)

    def _note(self, spec: QuantSpec, role: Role, node: NodeRef) -> None:
        row = self.target.capability(spec, role, node.op_type)
        if row is None:
            return
        self.out.opset = max(self.out.opset, row.opset)
        if row.warning and row.warning not in self.out.warnings:
            self.out.warnings.append(Caution("W104", row.warning))


def _find_bias_granularity(weight: QuantSpec) -> Granularity:
    """A bias has one axis: its scales follow the weight's channels along axis 0."""
    return PerChannel(0) if isinstance(weight.granularity, PerChannel) else PerTensor()


def _explain_rule(why: str, match: Match, spec: QuantSpec) -> str:
    return f"{why}; {match.rule.describe()}: {describe_spec(spec)}" if match.rule is not None else why


def share_scales(picked: Iterable[QuantizableOp], sites: list[SitePlan]) -> list[SitePlan]:
    """Name the groups that must have one scale (pooling and moving kernels), with their common bound."""
    root: dict[Site, Site] = {}

    def find(site: Site) -> Site:
        while root.get(site, site) != site:
            site = root[site]
        return site

    known = {site.site: site for site in sites}
    for unit in picked:
        for _, tensor in unit.data if unit.rule.shares and unit.out in known else ():
            if tensor in known and find(tensor) != find(unit.out):
                root[find(unit.out)] = find(tensor)
        inputs = [tensor for _, tensor in unit.data if unit.rule.alike and tensor in known]
        for tensor in inputs:
            if find(tensor) != find(inputs[0]):
                root[find(tensor)] = find(inputs[0])
    groups: dict[Site, list[SitePlan]] = {}
    for site in sites:
        groups.setdefault(find(site.site), []).append(site)
    out = []
    for site in sites:
        members = groups[find(site.site)]
        if len(members) == 1 or site.role in (Role.WEIGHT, Role.BIAS):
            out.append(site)
        else:
            out.append(replace(site, group=str(find(site.site)), bound=intersect_bounds(m.bound for m in members)))
    return out


def find_unused_observers(sites: Iterable[SitePlan]) -> Iterator[Caution]:
    """A line for each site whose observer does not come to work, because another site's gives the scale they share."""
    first: dict[str, SitePlan] = {}
    for site in sites:
        leader = first.setdefault(site.group, site) if site.group else site
        if leader.observer != site.observer:
            yield Caution(
                "W122",
                f"{site.site}: its observer {site.observer.name!r} is not used: one scale serves it and "
                f"{leader.site}, whose observer is {leader.observer.name!r}; name the same one for both",
            )


def _adopt_existing(site: SitePlan, frozen: dict[Site, SitePlan]) -> SitePlan:
    """A site whose group holds a pair that the model came with takes that pair's numbers, and keeps them."""
    given = next((pair for pair in frozen.values() if pair.group and pair.group == site.group), None)
    return site if given is None else replace(site, spec=given.spec, qparams=given.qparams)


def intersect_bounds(bounds: Iterable[Bound]) -> Bound:
    """The intersection of several bounds."""
    lows, highs = zip(*bounds, strict=True)
    low = [value for value in lows if value is not None]
    high = [value for value in highs if value is not None]
    return (max(low) if low else None, min(high) if high else None)
