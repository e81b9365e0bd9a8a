"""From chosen operators to sites: which tensors get a pair, who reads it, with which spec, sharing and bounds."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from onnxq.backends import Target
from onnxq.config import Rule, change_fields
from onnxq.graph import GraphIndex
from onnxq.numerics import qparams_from_range
from onnxq.plan import Bound, SitePlan
from onnxq.planner.problem import PlacementProblem, QuantizableOp
from onnxq.planner.requests import Match
from onnxq.sites import Caution, Edge, Edges, Names, NameSet, Role, Site, TensorId
from onnxq.spec import RULED, ObserverSpec, PerChannel, PerTensor, QParams, QuantSpec, describe_spec

# The inputs that read a pair; None: all that read its tensor.
Readers = Edges | None
# A request, and the spec that it means.
SpecRequest = tuple[Match, QuantSpec]

_LEAST_ERROR = ObserverSpec("mse")
# Up to so many bits a level more on one side is worth a search for the side.
_FEW_BITS = 4


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
    """Builds the sites of one choice of operators."""

    def __init__(self, problem: PlacementProblem, chosen: NameSet) -> None:
        self.ops = problem.ops
        self.requests = problem.requests
        self.target = problem.engine
        self.config = problem.config
        self.apart = problem.apart
        self.widths = problem.widths
        self.index = self.ops.index
        self.existing = self.ops.existing
        # Their pairs make them run in integers, so that their neighbours can count on it.
        self.chosen = chosen | self.ops.complete
        self.out = Placement()
        self.weights_alone = self.config.mode == "weight-only"
        # The model's own pairs with the readers that this choice adds to them.
        self.shared = {site.site: site for site in self.existing.sites}

    def place(self) -> Placement:
        """All sites of the chosen operators. Those that the model's own pairs quantize already need none."""
        picked = [op for op in self.ops if op.name in self.chosen]
        new = [op for op in picked if op.name not in self.ops.complete]
        activations = {} if self.weights_alone else self._find_activations(picked)
        placed: dict[Site, SitePlan] = {}
        for op in new:
            for site in self._list_sites(op, activations):
                # The first to ask for a pair decides on it: operators come in the order in which they run.
                placed.setdefault(site.site, site)
        sites = share_scales(new, [self.shared.get(name, site) for name, site in placed.items()])
        frozen = {site.site: site for site in sites if site.dequantize}
        self.out.existing = [frozen.get(site.site, site) for site in self.shared.values()]
        self.out.sites = [_adopt_existing(site, frozen) for site in sites if not site.dequantize]
        self.out.warnings += [
            line for line in find_unused_observers(self.out.sites) if line not in self.out.warnings
        ]
        self.out.warnings += self.requests.warn_of_unapplied()
        return self.out

    def _find_activations(self, picked: list[QuantizableOp]) -> dict[TensorId, Readers]:
        """Tensors with a pair -> the edges that read it; None when the pair sits at an int8 producer."""
        activations = {}
        for op in picked:
            # An operator that joins others reads their pairs, and one on scales of each run has a
            # quantizer of its own: for neither is another operator's input quantized.
            apart = op.name in self.apart
            for _, tensor in () if op.rule.joins or apart else op.data:
                if tensor not in activations:
                    activations[tensor] = self._find_readers(tensor)
            if op.closes_with_pair(self.config.bias) and not apart:
                activations[op.out] = None
        return activations

    def _find_readers(self, tensor: TensorId) -> Readers:
        maker = self.ops.find_integer_maker(tensor)
        if maker is not None and maker.name in self.chosen:
            return None
        return self._find_quantized_readers(tensor)

    def _find_quantized_readers(self, tensor: TensorId) -> Edges:
        beside = self.chosen - self.apart
        return tuple(
            edge
            for edge, op in self.ops.list_consumers(tensor)
            if (op is not None and op.name in beside)
            or self.index.find_node(edge.node).op_type in self.target.reads_pairs
        )

    def _list_sites(
        self, op: QuantizableOp, activations: dict[TensorId, Readers]
    ) -> Iterator[SitePlan]:
        apart = op.name in self.apart and not self.weights_alone
        inputs = [
            self._place_activation(op, edge, tensor, activations.get(tensor))
            for edge, tensor in op.data
            if apart or tensor in activations
        ]
        yield from inputs
        if self.target.whole:
            # The NPU reads and writes an operator's activations in one width, and runs a second
            # pair behind the first as a Convert.
            inputs = [
                self._convert_input(op, edge, site)
                for (edge, _), site in zip(op.data, inputs, strict=True)
            ]
            yield from inputs
        weights = [self._place_weight(op, edge) for edge in op.weights]
        yield from weights
        # Only beside integers on both sides has the accumulator a scale for the bias. The factors of a normalization
        # are no weight, but an operand.
        factors = weights + inputs[1:]
        fixed = inputs and factors and not inputs[0].spec.dynamic
        stored = op.bias in self.existing.by_reader
        if op.bias is not None and not stored and fixed and self.config.bias == "int32":
            yield self._place_bias(op, op.bias, inputs[0], factors[0])
        if op.out in activations and activations[op.out] is None:
            yield self._place_activation(op, None, op.out, None)

    def _place_activation(
        self,
        op: QuantizableOp,
        edge: Edge | None,
        tensor: TensorId,
        readers: Readers,
    ) -> SitePlan:
        """The pair of a tensor; inside a body that captures it, a pair of its own for each reader."""
        maker = self.ops.by_out.get(tensor)
        apart = op.name in self.apart
        pair = self.existing.pair_for(edge, tensor)
        # ONNX Runtime would merge a second pair with the one in front of it, and change the
        # numbers.
        if pair is not None and not apart:
            return self._share_pair(pair, tensor, readers)
        if self.target.whole:
            match, spec = self._find_widest(op if edge is None else maker, tensor)
        else:
            # The one that asks comes first, then its maker, then the other readers; a pair that its maker's kernel
            # writes is read like any other. A rule may name any of them.
            nodes = [op.node] if maker is None else [op.node, maker.node]
            nodes += [
                self.index.find_node(reader.node) for reader in self._find_quantized_readers(tensor)
            ]
            match = self.requests.match(Role.ACTIVATION, tensor, nodes)
            own = self.requests.match(Role.ACTIVATION, tensor, (op.node,))
            # Whether the scale stands in the file is for each reader to say.
            match = match if match.request.dynamic == own.request.dynamic else own
            spec = self.requests.make_spec(match, Role.ACTIVATION, op.node)
        if readers is None and maker is not None:
            # Where the size is not known the kernel clamps, as it does where results are few.
            results = math.prod(maker.candidate.output_shape() or (0,))
            if maker.bound[0] == 0.0 and 0 < maker.rule.footroom <= results:
                # Kernels in WebAssembly clamp results one by one, so that the activation is a Max on
                # the integers behind them, for which some levels must lie below 0.
                spec = replace(spec, footroom=spec.storage == "uint8" and not spec.symmetric)
        site: Site = tensor
        # No kernel forms across the border of a body, and a scale of each run serves one operator
        # alone.
        if edge is not None and (edge.scope != tensor.scope or apart):
            site = edge
            readers = (edge,)
        elif readers is not None:
            readers = tuple(reader for reader in readers if reader.scope == tensor.scope)
        is_output = tensor.scope == "" and self.index.is_output(tensor) and readers is None
        planned = self._make_site(
            op, match, spec, site=site, role=Role.ACTIVATION, consumers=readers, tensor=tensor
        )
        role = Role.OUTPUT if is_output else Role.ACTIVATION
        bound = maker.bound if maker else (None, None)
        # A table in the kernel has the scale of its result built in.
        table = maker.rule.result if maker and readers is None else None
        qparams = (table and table(spec)) or _read_range(match, spec, bound)
        return replace(planned, role=role, bound=bound, qparams=qparams)

    def _find_widest(self, maker: QuantizableOp | None, tensor: TensorId) -> SpecRequest:
        """The request and spec of the operator that makes a tensor; where none does, the widest of its readers'."""
        if maker is not None and maker.name in self.chosen:
            return self._find_own(maker, None, tensor)
        readers = self._list_chosen(tensor)
        # Beside others of its width, what moves values says how: it cannot move a second operand's.
        readers.sort(key=lambda reader: not reader[0].rule.shares)
        own = (self._find_own(op, edge, tensor) for op, edge in readers)
        return max(own, key=lambda request: request[1].bits)

    def _find_own(self, op: QuantizableOp, edge: Edge | None, tensor: TensorId) -> SpecRequest:
        """The request and spec for what an operator reads at an input, or makes (None).

        What only moves values has the width of their maker; where that is none, the widest of those that read them.
        """
        # The NPU moves values in the width that they have: a conversion is an operator more.
        source = op
        maker: QuantizableOp | None = op
        while maker is not None and maker.name in self.chosen and maker.rule.shares:
            source = maker
            maker = self.ops.by_out.get(maker.data[0][1])
        asking = (
            [maker]
            if maker is not None and maker.name in self.chosen
            else self._list_final(source.data[0][1])
        )
        own = (self._find_request(one, tensor) for one in asking or [op])
        match, spec = max(own, key=lambda request: request[1].bits)
        return match, spec if edge is None else op.rule.adapt(edge.index, spec)

    def _list_final(self, tensor: TensorId) -> list[QuantizableOp]:
        """The operators that read a tensor, or what others moved of it."""
        return [
            one
            for op, _ in self._list_chosen(tensor)
            for one in (self._list_final(op.out) if op.rule.shares else [op])
        ]

    def _list_chosen(self, tensor: TensorId) -> list[tuple[QuantizableOp, Edge]]:
        """The chosen operators that read a tensor, each with the input that does."""
        return [
            (op, edge)
            for edge, op in self.ops.list_consumers(tensor)
            if op is not None and op.name in self.chosen
        ]

    def _find_request(self, op: QuantizableOp, tensor: TensorId) -> SpecRequest:
        """The request and spec of an operator for one of its tensors."""
        match = self.requests.match(Role.ACTIVATION, tensor, (op.node,))
        bits = self.widths.get(op.name, op.rule.bits)
        if bits is not None and (match.rule is None or match.rule.set.bits is None):
            # The storage was chosen for other bits.
            match = replace(match, request=change_fields(match.request, bits=bits, storage=""))
        return match, self.requests.make_spec(match, Role.ACTIVATION, op.node)

    def _convert_input(self, op: QuantizableOp, edge: Edge, pair: SitePlan) -> SitePlan:
        """The pair that an input reads: that of its tensor, or a second one behind it in the operator's own width."""
        tensor = pair.quantized_tensor
        match, spec = self._find_own(op, edge, tensor)
        # A pair that the model came with is read as it is.
        if spec == pair.spec or pair.dequantize:
            return pair
        site = self._make_site(
            op, match, spec, site=edge, role=Role.ACTIVATION, consumers=(edge,), tensor=tensor
        )
        return replace(site, bound=pair.bound, qparams=_read_range(match, spec, pair.bound))

    def _share_pair(self, pair: SitePlan, tensor: TensorId, readers: Readers) -> SitePlan:
        """The pair that the model came with, read by these inputs too; readers None: by all that read the tensor."""
        shared = self.shared[pair.site]
        consumers = dict.fromkeys(shared.named_consumers)
        for edge in self.index.list_consumers(tensor) if readers is None else readers:
            inside = edge.scope == pair.site.scope and edge.node not in self.existing.stand_ins
            # Inputs behind another pair of the model's own stay there.
            if inside and self.existing.by_edge.get(edge, pair).site == pair.site:
                consumers[edge] = None
        self.shared[pair.site] = replace(shared, consumers=tuple(consumers))
        return self.shared[pair.site]

    def _place_weight(self, op: QuantizableOp, edge: Edge) -> SitePlan:
        """The weight's site: the tensor itself, or the edge when its readers need different copies; the model's own."""
        pair = self.existing.by_reader.get(edge)
        if pair is not None:
            return self.shared[pair.site]
        tensor = self._find_tensor(op, edge)
        match, spec = self._ask_weight(tensor, op)
        readers = []
        # ONNX Runtime loads no file in which a pair's 4- or 8-bit weight lies outside the If whose
        # body reads it, so each body has a copy of its own.
        alike = tensor.scope == op.node.scope
        for reader in self.index.list_consumers(tensor):
            other = self.ops.by_name.get(reader.node)
            if other is not None and other.name in self.chosen and reader in other.weights:
                readers.append(reader)
                alike = (
                    alike
                    and reader.scope == tensor.scope
                    and self._ask_weight(tensor, other)[1] == spec
                )
        consumers = tuple(readers) if alike else (edge,)
        site = tensor if alike else edge
        return self._make_site(
            op, match, spec, site=site, role=Role.WEIGHT, consumers=consumers, tensor=tensor
        )

    def _place_bias(
        self, op: QuantizableOp, edge: Edge, activation: SitePlan, weight: SitePlan
    ) -> SitePlan:
        tensor = self._find_tensor(op, edge)
        # Readers with other inputs or weights need the bias on another scale, and so a copy of their own.
        alone = self.index.list_consumers(tensor) == (edge,) and tensor.scope == edge.scope
        # A bias has one axis: its scales follow the weight's channels along axis 0.
        grain = PerChannel(0) if weight.spec.has_channels else PerTensor()
        return SitePlan(
            site=tensor if alone else edge,
            role=Role.BIAS,
            spec=QuantSpec(bits=32, granularity=grain),
            rule=op.rule.name,
            reason="int32 bias in units of the accumulator: input scale times weight scale",
            consumers=(edge,),
            derived=(activation.site, weight.site),
            tensor=tensor,
        )

    def _ask_weight(self, tensor: TensorId, op: QuantizableOp) -> SpecRequest:
        match = self.requests.match(Role.WEIGHT, tensor, (op.node,))
        return match, self.requests.make_spec(match, Role.WEIGHT, op.node)

    def _find_tensor(self, op: QuantizableOp, edge: Edge) -> TensorId:
        tensor = self.index.find_input(op.node, edge.index)
        assert tensor is not None
        return tensor

    def _make_site(
        self,
        op: QuantizableOp,
        match: Match,
        spec: QuantSpec,
        *,
        site: Site,
        role: Role,
        consumers: Readers,
        tensor: TensorId,
    ) -> SitePlan:
        """A new site, whose opset, warning and rule the placement takes note of."""
        # ONNX Runtime fails to load int8 pairs around a MatMul with a bias from opset 21 on, so
        # that only pairs that need it, such as int4 and 16 bits, raise the opset so far.
        row = self.target.capability(spec, role, op.node.op_type)
        if row is not None:
            self.out.opset = max(self.out.opset, row.opset)
            warning = row.warning.replace("{op}", op.node.op_type)
            if warning and warning not in self.out.warnings:
                self.out.warnings.append(Caution("W104", warning))
        reason = op.rule.why
        if match.rule is not None:
            self.out.rules.setdefault(site, match.rule)
            reason = f"{reason}; {match.rule.describe()}: {describe_spec(spec)}"
        return SitePlan(
            site=site,
            role=role,
            spec=spec,
            observer=self._choose_observer(role, spec, match.request.observer),
            rule=op.rule.name,
            reason=reason,
            consumers=consumers,
            tensor=tensor,
        )

    def _choose_observer(self, role: Role, spec: QuantSpec, request: ObserverSpec) -> ObserverSpec:
        """The observer asked for, which may find negative scales of blocks where the engine reads them."""
        uneven = (
            spec.has_blocks and spec.bits <= _FEW_BITS and spec.symmetric and not spec.narrow_range
        )
        # A decoder in 4 bits: KL .0080 -> .0070.
        if role.is_weight and uneven and self.target.signed_scales and request == _LEAST_ERROR:
            return replace(request, options=(("signed_scales", True),))
        return request


def _read_range(match: Match, spec: QuantSpec, bound: Bound) -> QParams | None:
    """The numbers for the range that a rule gives."""
    ends = None if match.rule is None else match.rule.set.range
    return None if ends is None else qparams_from_range(*ends, spec, origin=RULED, bound=bound)


# What ORT quantizes by itself when it stands between a DequantizeLinear and a QuantizeLinear.
_GUARDED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "AveragePool", "Softmax")


def list_weighted(sites: Iterable[SitePlan]) -> set[str]:
    """The names of the nodes that read a quantized weight."""
    return {edge.node for site in sites if site.role.is_weight for edge in site.named_consumers}


def find_float_nodes(index: GraphIndex, sites: Iterable[SitePlan], engine: Target) -> Names:
    """Nodes the plan leaves float though the engine might not."""
    int8 = list_weighted(sites)
    # The NPU computes a Log between pairs of others in integers, though it is left float (0 dB).
    ops = {*engine.misreads, *(_GUARDED if engine.quantizes_alone else ())}
    return tuple(node.name for node in index.nodes if node.op_type in ops and node.name not in int8)


def share_scales(picked: Iterable[QuantizableOp], sites: list[SitePlan]) -> list[SitePlan]:
    """Name the groups that must have one scale (pooling and moving kernels), with their common bound."""
    root: dict[Site, Site] = {}

    def find_root(site: Site) -> Site:
        while root.get(site, site) != site:
            site = root[site]
        return site

    known = {site.site for site in sites}
    for op in picked:
        inputs = [tensor for _, tensor in op.data if tensor in known]
        for tensor in inputs if op.rule.shares and op.out in known else ():
            root[find_root(op.out)] = find_root(tensor)
        # In TensorRT the kernels in front of a Concat write its int8 result, in its scale.
        for tensor in inputs if op.rule.alike else ():
            root[find_root(tensor)] = find_root(inputs[0])
    groups: dict[Site, list[SitePlan]] = {}
    for site in sites:
        groups.setdefault(find_root(site.site), []).append(site)
    grouped = []
    for site in sites:
        leader = find_root(site.site)
        if len(groups[leader]) > 1 and not site.role.is_constant:
            # The one range has to serve them all, so no more of it than every member's values can fill.
            bound = intersect_bounds(member.bound for member in groups[leader])
            # One scale is one zero point, too: either all of them have levels below 0 for a Max, or
            # none.
            spec = replace(site.spec, footroom=groups[leader][0].spec.footroom)
            site = replace(site, group=str(leader), bound=bound, spec=spec)
        grouped.append(site)
    return grouped


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
    for pair in frozen.values():
        if pair.group and pair.group == site.group:
            return replace(site, spec=pair.spec, qparams=pair.qparams)
    return site


def intersect_bounds(bounds: Iterable[Bound]) -> Bound:
    """The intersection of several bounds."""
    lows, highs = zip(*bounds, strict=True)
    low = max((value for value in lows if value is not None), default=None)
    return low, min((value for value in highs if value is not None), default=None)
