"""Which operators run in integers: the minimum cut between the time nodes take and the time pairs take.

Each operator is int8 (1) or float (0). It costs its float or its int8 time; a tensor made in float and read in
int8 costs a QuantizeLinear, one made in int8 and read in float a DequantizeLinear, each once however many
readers. All terms are submodular, so the best assignment is a minimum s-t cut (Kolmogorov and Zabih,
"What energy functions can be minimized via graph cuts?", PAMI 2004).

For several kinds of CPU one placement is made: no slower than float on any, and close to the best on each. A weighted
sum of their times is again the energy of a minimum cut. The weights move towards the kind that loses most beside a
placement of its own until all lose alike (a supported point of the Pareto front: Ehrgott, "Multicriteria
Optimization", 2005, chapter 3); the cut that loses least on its worst kind is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from onnxq.backends.costs import Cost, MachineCosts, OpCase
from onnxq.planner.problem import PlacementProblem, QuantizableOp, QuantizableOps
from onnxq.sites import Caution, Cautions, Names, NameSet, TensorId

# Whether an operator runs in integers, for those whose side is settled.
Sides = Mapping[str, bool]


@dataclass
class FlowNetwork:
    """A capacitated directed graph with Dinic's maximum flow (Dinic 1970)."""

    names: dict[Hashable, int] = field(default_factory=dict)
    heads: list[list[int]] = field(default_factory=list)
    to: list[int] = field(default_factory=list)
    cap: list[float] = field(default_factory=list)

    def add_vertex(self, name: Hashable) -> int:
        """The number of a vertex, which is added with its first use."""
        if name not in self.names:
            self.names[name] = len(self.heads)
            self.heads.append([])
        return self.names[name]

    def add_edge(self, a: Hashable, b: Hashable, capacity: float) -> None:
        """Add an edge; one without capacity is left out."""
        if capacity <= 0:
            return
        u = self.add_vertex(a)
        v = self.add_vertex(b)
        for source, sink, amount in ((u, v, capacity), (v, u, 0.0)):
            self.heads[source].append(len(self.to))
            self.to.append(sink)
            self.cap.append(amount)

    def source_side(self, source: Hashable, sink: Hashable) -> set[int]:
        """The vertices still reachable from `source` once the flow is maximal."""
        s = self.add_vertex(source)
        t = self.add_vertex(sink)
        while True:
            level = {s: 0}
            queue = [s]
            for u in queue:
                for e in self.heads[u]:
                    if self.cap[e] > 1e-9 and self.to[e] not in level:
                        level[self.to[e]] = level[u] + 1
                        queue.append(self.to[e])
            if t not in level:
                return set(level)
            position = [0] * len(self.heads)
            while self._augment_path(s, t, level, position):
                pass

    def _augment_path(self, s: int, t: int, level: dict[int, int], position: list[int]) -> bool:
        """One path of the level graph, followed with a stack so that deep models do not overflow it."""
        path: list[int] = []
        u = s
        while u != t:
            while position[u] < len(self.heads[u]):
                e = self.heads[u][position[u]]
                # What rounding leaves of a capacity is none.
                if self.cap[e] > 1e-9 and level.get(self.to[e], -1) == level[u] + 1:
                    break
                position[u] += 1
            else:
                if not path:
                    return False
                u = self.to[path.pop() ^ 1]
                position[u] += 1
                continue
            path.append(e)
            u = self.to[e]
        amount = min(self.cap[e] for e in path)
        for e in path:
            self.cap[e] -= amount
            # Edges come in pairs: e ^ 1 is the way back of e.
            self.cap[e ^ 1] += amount
        return True


# Microseconds: no sum of real times comes near, and float64 still tells an eighth of one beside it.
_INFINITE = 1e15
# int8 must earn this much of the float time, and this many microseconds: pairs also cost accuracy, and the
# model of the costs is no finer.
_MARGIN = 0.03
_MARGIN_US = 0.2
_SOURCE = ("source",)
_SINK = ("sink",)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementCosts:
    """Predicted microseconds of each operator and each tensor's pair, on one kind of CPU or weighted over several."""

    ops: Mapping[str, Cost]
    quantize: Mapping[TensorId, float]
    dequantize: Mapping[TensorId, float]
    margin_us: float = _MARGIN_US


def add_costs(parts: Sequence[tuple[PlacementCosts, float]]) -> PlacementCosts:
    """The sum of costs of the same operators, each times its weight."""
    costs = [cost for cost, _ in parts]

    def total(values: Iterable[float]) -> float:
        return sum(value * weight for value, (_, weight) in zip(values, parts, strict=True))

    def total_each(tables: Sequence[Mapping[TensorId, float]]) -> dict[TensorId, float]:
        return {key: total(table[key] for table in tables) for key in tables[0]}

    ops = {
        name: Cost(
            total(cost.ops[name].float_us for cost in costs),
            total(cost.ops[name].int8_us for cost in costs),
        )
        for name in costs[0].ops
    }
    return PlacementCosts(
        ops=ops,
        quantize=total_each([cost.quantize for cost in costs]),
        dequantize=total_each([cost.dequantize for cost in costs]),
        margin_us=total(cost.margin_us for cost in costs),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorUse:
    """Who makes a tensor and who reads it, as a placement sees it.

    maker: the operator that makes it in integers where it is int8; None when it always comes in float. readers:
    operators that may read integers. read_float: something that stays float reads it. dequantizes: its maker writes
    integers only. from_conv, to_conv: a float Conv makes it, or reads it. paired: it has a pair already, whoever runs
    in integers.
    """

    tensor: TensorId
    elements: int | None
    maker: str | None
    readers: Names
    read_float: bool
    dequantizes: bool
    from_conv: bool
    to_conv: bool
    paired: bool


@dataclass(frozen=True, eq=False)
class CutProblem:
    """The choice between float and integers for every operator of a model.

    dynamic: on scales of each run. apart: names of the operators that alone are so; they read float values.
    """

    ops: QuantizableOps
    dynamic: bool = False
    apart: NameSet = frozenset()

    @classmethod
    def of_placement(cls, problem: PlacementProblem) -> CutProblem:
        """The choice of a placement problem."""
        return cls(problem.ops, problem.engine.dynamic, problem.apart)

    def compute_costs(self, cpu: MachineCosts) -> PlacementCosts:
        """The costs of operators and pairs on a kind of CPU."""
        quantize = {
            # A pair that the model came with runs in any case.
            use.tensor: 0.0
            if use.paired
            else cpu.predict_quantize(use.elements, from_conv=use.from_conv, dynamic=self.dynamic)
            for use in self.uses
        }
        dequantize = {
            use.tensor: cpu.predict_dequantize(use.elements, to_conv=use.to_conv)
            for use in self.uses
        }
        ops = {op.name: self._find_op_cost(op, cpu) for op in self.ops}
        return PlacementCosts(ops=ops, quantize=quantize, dequantize=dequantize)

    def minimum_cut(self, costs: PlacementCosts, fixed: Sides) -> NameSet:
        """Names of the operators that run in integers at the least predicted time.

        fixed: operators whose side is given (True int8, False float) by a rule or by the person.
        """
        net = FlowNetwork()
        # The source's side runs in integers: the cut then takes the operator's edge to the sink, at the int8 price.
        for op in self.ops:
            cost = costs.ops[op.name]
            side = fixed.get(op.name)
            int8_us = cost.int8_us + _MARGIN * cost.float_us + costs.margin_us * op.rule.compute
            net.add_edge(op.name, _SINK, _INFINITE if side is False else int8_us)
            net.add_edge(_SOURCE, op.name, _INFINITE if side is True else cost.float_us)
            if not op.rule.compute:
                self._tie_follower(net, op, fixed)
        for use in self.uses:
            _add_pairs(net, use, costs)
        reached = net.source_side(_SOURCE, _SINK)
        return frozenset(op.name for op in self.ops if net.names[op.name] in reached)

    def time_us(self, costs: PlacementCosts, chosen: NameSet) -> float:
        """Predicted time of all operators with their pairs when `chosen` run in integers."""
        total = 0.0
        for name, cost in costs.ops.items():
            total += cost.int8_us if name in chosen else cost.float_us
        for use in self.uses:
            int8_made = use.maker in chosen
            if not int8_made and not chosen.isdisjoint(use.readers):
                total += costs.quantize[use.tensor]
            read_float = use.read_float or not chosen.issuperset(use.readers)
            # Makers such as MatMulIntegerToFloat write floats by themselves.
            if use.dequantizes and int8_made and read_float:
                total += costs.dequantize[use.tensor]
        return total

    @cached_property
    def uses(self) -> tuple[TensorUse, ...]:
        """Every tensor that an operator makes or reads."""
        # A set has no order of its own, and which of equal cuts is found would change from run to
        # run.
        tensors = dict.fromkeys(
            tensor for op in self.ops for tensor in (*(read for _, read in op.data), op.out)
        )
        uses = (_describe_use(self.ops, tensor, self.apart) for tensor in tensors)
        return tuple(use for use in uses if use is not None)

    def _find_op_cost(self, op: QuantizableOp, cpu: MachineCosts) -> Cost:
        """The predicted float and int8 time of an operator, its folded activation included."""
        candidate = op.candidate
        case = OpCase(
            op_type=op.node.op_type,
            inputs=tuple(candidate.shape_of(tensor) for _, tensor in op.data),
            output=candidate.output_shape(),
            weight=None if op.rule.weight is None else candidate.shape(op.rule.weight),
            group=op.node.groups,
            kernel=tuple(candidate.attr("kernel_shape", ())),
            strides=tuple(candidate.attr("strides", ())),
            activation=op.activation.op_type if op.activation is not None else "",
            pointwise=bool(op.rule.pointwise),
        )
        cost = cpu.predict_node(case)
        if op.name not in self.apart:
            return cost
        own = sum(
            cpu.predict_quantize(None if shape is None else math.prod(shape), dynamic=True)
            for shape in case.inputs
        )
        return Cost(cost.float_us, cost.int8_us + own)

    def _tie_follower(self, net: FlowNetwork, op: QuantizableOp, fixed: Sides) -> None:
        """Adding, pooling and moving never start a quantized region: their inputs must be quantized without them.

        Otherwise a few saved bytes would put noise on tensors (attention, residual streams) nobody needs in integers.
        One that the person forces may start a region.
        """
        for _, tensor in op.data:
            maker = self.ops.find_integer_maker(tensor)
            if maker is not None and fixed.get(maker.name) is not False:
                # An infinite edge from a to b forbids a in integers beside b in float.
                net.add_edge(op.name, maker.name, _INFINITE)
                continue
            readers = [
                reader.name
                for reader in self.ops.list_readers(tensor)
                if reader.rule.compute
                and reader.name not in self.apart
                and fixed.get(reader.name) is not False
            ]
            # Any reader would do, but a cut can only say that one is needed, not one of several.
            # Without any, the edge to the sink keeps the operator float.
            if readers or fixed.get(op.name) is not True:
                net.add_edge(op.name, readers[0] if readers else _SINK, _INFINITE)


def _describe_use(ops: QuantizableOps, tensor: TensorId, apart: NameSet) -> TensorUse | None:
    maker = ops.by_out.get(tensor)
    readers = []
    floats = []
    for edge, op in ops.list_consumers(tensor):
        if op is None or op.name in apart:
            floats.append(ops.index.find_node(edge.node))
        else:
            readers.append(op)
    # What no operator with a rule makes or reads costs the same in every placement.
    some = maker or (readers[0] if readers else None)
    if some is None:
        return None
    shape = some.candidate.shape_of(tensor)
    convs = any(op.node.op_type == "Conv" for op in readers)
    producer = ops.index.find_producer(tensor) if maker is None else maker.node
    int8_maker = ops.find_integer_maker(tensor)
    return TensorUse(
        tensor=tensor,
        elements=None if shape is None else math.prod(shape),
        maker=None if int8_maker is None else int8_maker.name,
        readers=tuple(op.name for op in readers),
        read_float=bool(floats) or ops.index.is_output(tensor),
        dequantizes=int8_maker is not None and int8_maker.writes_integers,
        from_conv=producer is not None and producer.op_type == "Conv" and convs,
        to_conv=convs or any(node.op_type == "Conv" for node in floats),
        paired=tensor in ops.existing.by_tensor,
    )


def _add_pairs(net: FlowNetwork, use: TensorUse, costs: PlacementCosts) -> None:
    """The pair of one tensor: `needs int8` and `needs float` are vertices of their own, so it is paid once."""
    if use.readers:
        need = ("int8", use.tensor)
        for reader in use.readers:
            net.add_edge(reader, need, _INFINITE)
        # Cut where a reader is int8 and the maker is not: the price of the pair.
        net.add_edge(need, _SINK if use.maker is None else use.maker, costs.quantize[use.tensor])
    if not use.dequantizes or use.maker is None:
        return
    need = ("float", use.tensor)
    if use.read_float:
        net.add_edge(need, _SINK, _INFINITE)
    for reader in use.readers:
        net.add_edge(need, reader, _INFINITE)
    # Cut where the maker is int8 and any reader is float.
    net.add_edge(use.maker, need, costs.dequantize[use.tensor])


# A placement for all kinds may be predicted so much slower than one kind's own; that of several engines so much slower
# than one engine's own, measured as well.
TOLERATED = 1.03
MOST_LOSS = 1.10
# Change of the logarithm of the weights, halved from step to step; both ends lie 2.9 to 1 or more from equal weights.
_STEPS = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)
# Difference below which two losses, or two times in microseconds, are one: sums of floats in another order.
_EQUAL = 1e-9
# Microseconds that no model takes, and that still leave float64 the digits to tell two placements apart.
_PROHIBITIVE_US = 1e9


@dataclass(frozen=True)
class Forecast:
    """Predicted microseconds of all operators on a kind of CPU: in float, as placed, as placed for that kind alone."""

    cpu: str
    float_us: float
    placed_us: float
    own_us: float

    @property
    def speedup(self) -> float:
        """Float time over the placement's."""
        return self.float_us / self.placed_us if self.placed_us else 1.0

    @property
    def loss(self) -> float:
        """The placement's time over that of the kind's own; 1 is the best."""
        return self.placed_us / self.own_us if self.own_us else 1.0


@dataclass(frozen=True)
class Balance:
    """A placement, the costs it is the minimum cut of, and its gain on each kind of CPU."""

    chosen: NameSet
    costs: PlacementCosts
    forecasts: tuple[Forecast, ...]

    def make_warnings(self) -> Cautions:
        """A line for each kind of CPU, or engine, that could be better served."""
        # The tables of several engines have their names in theirs.
        most = MOST_LOSS if " " in self.forecasts[0].cpu else TOLERATED
        return tuple(_warn_of_kind(forecast) for forecast in self.forecasts if forecast.loss > most)


def find_balance(
    problem: CutProblem,
    fixed: Sides,
    tables: Mapping[str, MachineCosts],
    weights: Mapping[str, float] = MappingProxyType({}),
) -> Balance:
    """The placement for all kinds of CPU, or engines, that have a table.

    fixed: operators whose side is given. Operators forced into integers count as part of the float model. weights: how
    much the loss of each table counts; by the worst loss without.
    """
    costs = {name: problem.compute_costs(table) for name, table in tables.items()}
    own = {name: problem.minimum_cut(costs[name], fixed) for name in costs}
    float_us = {name: problem.time_us(kind, frozenset()) for name, kind in costs.items()}
    own_us = {name: problem.time_us(kind, own[name]) for name, kind in costs.items()}

    def weigh(chosen: NameSet, blend: PlacementCosts) -> Balance:
        forecasts = (
            Forecast(name, float_us[name], problem.time_us(kind, chosen), own_us[name])
            for name, kind in costs.items()
        )
        return Balance(chosen, blend, tuple(forecasts))

    balances = _cut_sums(problem, costs, own_us, fixed, weights, weigh)
    equal = balances[0].costs
    # The smallest placement: the operators that the person forces and those they cannot do without.
    # Prices, not sides: what the forced operators cannot do without still comes along.
    dear = {
        name: Cost(cost.float_us, cost.float_us + _PROHIBITIVE_US)
        for name, cost in equal.ops.items()
    }
    least = problem.minimum_cut(replace(equal, ops=dear), fixed)
    balances += [weigh(chosen, equal) for chosen in (*own.values(), least)]
    # No kind may lose by what is not forced.
    bounds = {name: problem.time_us(kind, least) + _EQUAL for name, kind in costs.items()}
    allowed = [
        each
        for each in balances
        if all(part.placed_us <= bounds[part.cpu] for part in each.forecasts)
    ]
    return min(allowed, key=lambda balance: _rank_losses(balance, weights))


def _warn_of_kind(forecast: Forecast) -> Caution:
    own = forecast.float_us / forecast.own_us
    kind, _, target = forecast.cpu.partition(" ")
    fix = f"Choose `cpu={kind!r}` if the model runs only there"
    if target:
        kind = f"{kind} in target {target!r}"
        fix = f"Make a file of its own there: `target={target!r}`"
    text = (
        f"on CPUs of kind {kind} this placement is predicted {forecast.loss - 1:.0%} slower than one made "
        f"for them ({forecast.speedup:.2f}x the speed of float instead of {own:.2f}x): more int8 would cost another "
        f"its gain. {fix}"
    )
    return Caution("W103", text)


def _rank_losses(balance: Balance, weights: Mapping[str, float]) -> tuple[float, float]:
    """The worst kind's loss, then the sum of all; rounded, so that the order of floating-point sums decides nothing."""
    losses = [forecast.loss for forecast in balance.forecasts]
    if weights:
        return round(
            sum(forecast.loss * weights[forecast.cpu] for forecast in balance.forecasts), 9
        ), 0.0
    return round(max(losses), 9), round(sum(losses), 9)


def _cut_sums(
    problem: CutProblem,
    costs: Mapping[str, PlacementCosts],
    own_us: Mapping[str, float],
    fixed: Sides,
    weights: Mapping[str, float],
    weigh: Callable[[NameSet, PlacementCosts], Balance],
) -> list[Balance]:
    """Cuts of weighted sums, that of equal weights first, until no kind loses anything or the steps are spent.

    own_us: the time of each kind's own placement. weights: stated ones, which do not move.
    """
    logs = {name: math.log(weights.get(name, 1.0)) for name in costs}
    balances = []
    for step in _STEPS:
        # Times count in those of the kind's own placement, so that slow machines weigh no more than fast ones.
        total = sum(map(math.exp, logs.values()))
        scale = max(own_us.values())
        parts = [
            (costs[name], math.exp(logs[name]) / total * scale / (own_us[name] or 1.0))
            for name in costs
        ]
        blend = add_costs(parts)
        balances.append(weigh(problem.minimum_cut(blend, fixed), blend))
        losses = {forecast.cpu: forecast.loss for forecast in balances[-1].forecasts}
        least = min(losses.values())
        most = max(losses.values())
        spread = most - least
        if weights or spread < _EQUAL or most <= 1 + _EQUAL:
            break
        # From -1 to 1: the kind that loses most gains the whole step, the one that loses least gives it.
        middle = (most + least) / 2
        logs = {
            name: log + step * 2 * (losses[name] - middle) / spread for name, log in logs.items()
        }
    return balances
