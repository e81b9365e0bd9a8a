"""Which operators run in integers: the minimum cut between the time nodes take and the time pairs take.

Each operator is int8 (1) or float (0). It costs its float or its int8 time; a tensor made in float and read in
int8 costs a QuantizeLinear, one made in int8 and read in float a DequantizeLinear, each once however many
readers. All terms are submodular, so the best assignment is a minimum s-t cut (Kolmogorov and Zabih,
"What energy functions can be minimized via graph cuts?", PAMI 2004).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxq.backends import Output
from onnxq.backends.costs import Cost, MachineCosts, OpCase
from onnxq.planner.flow import FlowNetwork
from onnxq.planner.operators import QuantizableOp, QuantizableOps
from onnxq.sites import TensorId

# Microseconds: no sum of real times comes near, and float64 still tells an eighth of one beside it.
_INFINITE = 1e15
# int8 must earn this much of the float time, and this many microseconds: pairs also cost accuracy, and the
# model of the costs is no finer.
_MARGIN, _MARGIN_US = 0.03, 0.2
_SOURCE, _SINK = ("source",), ("sink",)


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

    ops = {
        name: Cost(total(one.ops[name].float_us for one in costs), total(one.ops[name].int8_us for one in costs))
        for name in costs[0].ops
    }
    return PlacementCosts(
        ops=ops,
        quantize={key: total(one.quantize[key] for one in costs) for key in costs[0].quantize},
        dequantize={key: total(one.dequantize[key] for one in costs) for key in costs[0].dequantize},
        margin_us=total(one.margin_us for one in costs),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _TensorUse:
    """Who makes a tensor and who reads it, as the cut sees it.

    maker: the operator that makes it in integers where it is int8; None when it always comes in float. readers:
    operators that may read integers. read_float: something that stays float reads it. dequantizes: its maker writes
    integers only. from_conv, to_conv: a float Conv makes it, or reads it. paired: it has a pair already, whoever runs
    in integers.
    """

    tensor: TensorId
    elements: int | None
    maker: str | None
    readers: tuple[str, ...]
    read_float: bool
    dequantizes: bool
    from_conv: bool
    to_conv: bool
    paired: bool = False


@dataclass(frozen=True, eq=False)
class CutProblem:
    """The choice between float and integers for every operator of a model.

    dynamic: on scales of each run. apart: names of the operators that alone are so; they read float values.
    """

    ops: QuantizableOps
    dynamic: bool = False
    apart: frozenset[str] = frozenset()

    def costs(self, cpu: MachineCosts) -> PlacementCosts:
        """The costs of operators and pairs on a kind of CPU."""
        return PlacementCosts(
            ops={op.name: self._find_op_cost(op, cpu) for op in self.ops},
            # A pair that the model came with runs in any case.
            quantize={
                use.tensor: 0.0
                if use.paired
                else cpu.predict_quantize(use.elements, from_conv=use.from_conv, dynamic=self.dynamic)
                for use in self._uses
            },
            dequantize={use.tensor: cpu.predict_dequantize(use.elements, to_conv=use.to_conv) for use in self._uses},
        )

    def minimum_cut(self, costs: PlacementCosts, fixed: Mapping[str, bool]) -> frozenset[str]:
        """Names of the operators that run in integers at the least predicted time.

        fixed: operators whose side is given (True int8, False float) by a rule or by the person.
        """
        net = FlowNetwork()
        # The source's side runs in integers: the cut then takes the operator's edge to the sink, at the int8 price.
        net.vertex(_SOURCE), net.vertex(_SINK)
        for op in self.ops:
            cost, side = costs.ops[op.name], fixed.get(op.name)
            int8_us = cost.int8_us + _MARGIN * cost.float_us + costs.margin_us * op.rule.compute
            net.edge(op.name, _SINK, _INFINITE if side is False else int8_us)
            net.edge(_SOURCE, op.name, _INFINITE if side is True else cost.float_us)
            if not op.rule.compute:
                self._follow(net, op, fixed)
        for use in self._uses:
            _add_pairs(net, use, costs)
        reached = net.source_side(_SOURCE, _SINK)
        return frozenset(op.name for op in self.ops if net.names[op.name] in reached)

    def time_us(self, costs: PlacementCosts, chosen: frozenset[str]) -> float:
        """Predicted time of all operators with their pairs when `chosen` run in integers."""
        total = 0.0
        for name, cost in costs.ops.items():
            total += cost.int8_us if name in chosen else cost.float_us
        for use in self._uses:
            int8_made, int8_read = use.maker in chosen, any(name in chosen for name in use.readers)
            if int8_read and not int8_made:
                total += costs.quantize[use.tensor]
            if use.dequantizes and int8_made and (use.read_float or any(name not in chosen for name in use.readers)):
                total += costs.dequantize[use.tensor]
        return total

    @cached_property
    def _uses(self) -> tuple[_TensorUse, ...]:
        tensors = dict.fromkeys(tensor for op in self.ops for tensor in (*(read for _, read in op.data), op.out))
        uses = (_describe_use(self.ops, tensor, self.apart) for tensor in tensors)
        return tuple(use for use in uses if use is not None)

    def _find_op_cost(self, op: QuantizableOp, cpu: MachineCosts) -> Cost:
        cost = _find_op_cost(self.ops, op, cpu)
        if op.name not in self.apart:
            return cost
        shapes = (self.ops.candidate(op.node).shape_of(tensor) for _, tensor in op.data)
        own = sum(cpu.predict_quantize(None if one is None else math.prod(one), dynamic=True) for one in shapes)
        return Cost(cost.float_us, cost.int8_us + own)

    def _follow(self, net: FlowNetwork, op: QuantizableOp, fixed: Mapping[str, bool]) -> None:
        """Adding, pooling and moving never start a quantized region: their inputs must be quantized without them.

        Otherwise a few saved bytes would put noise on tensors (attention, residual streams) nobody needs in integers.
        One that the person forces may start a region.
        """
        for _, tensor in op.data:
            maker = self.ops.by_out.get(tensor)
            if maker is not None and maker.rule.output is not Output.FLOAT and fixed.get(maker.name) is not False:
                net.edge(op.name, maker.name, _INFINITE)
                continue
            consumers = self.ops.consumers(tensor)
            readers = [other for _, other in consumers if other is not None and other.rule.compute]
            readers = [one for one in readers if one.name not in self.apart and fixed.get(one.name) is not False]
            if readers or fixed.get(op.name) is not True:
                net.edge(op.name, readers[0].name if readers else _SINK, _INFINITE)


def _find_op_cost(ops: QuantizableOps, op: QuantizableOp, cpu: MachineCosts) -> Cost:
    """Predicted float and int8 time of an operator, its folded activation included."""
    candidate = ops.candidate(op.node)
    case = OpCase(
        op_type=op.node.op_type,
        inputs=tuple(candidate.shape_of(tensor) for _, tensor in op.data),
        output=candidate.output_shape(),
        weight=None if op.rule.weight is None else candidate.shape(op.rule.weight),
        group=int(candidate.attr("group", 1)),
        kernel=tuple(candidate.attr("kernel_shape", ())),
        strides=tuple(candidate.attr("strides", ())),
        activation=op.activation.op_type if op.activation is not None else "",
    )
    return cpu.predict_node(case)


def _describe_use(ops: QuantizableOps, tensor: TensorId, apart: frozenset[str]) -> _TensorUse | None:
    maker = ops.by_out.get(tensor)
    consumers = [(edge, None if op is not None and op.name in apart else op) for edge, op in ops.consumers(tensor)]
    readers = [op for _, op in consumers if op is not None]
    some = maker or (readers[0] if readers else None)
    if some is None:
        return None
    floats = [edge for edge, op in consumers if op is None]
    shape = ops.candidate(some.node).shape_of(tensor)
    convs = any(op.node.op_type == "Conv" for op in readers)
    producer = ops.index.producer(tensor) if maker is None else maker.node
    int8_maker = maker if maker is not None and maker.rule.output is not Output.FLOAT else None
    return _TensorUse(
        tensor=tensor,
        elements=None if shape is None else math.prod(shape),
        maker=None if int8_maker is None else int8_maker.name,
        readers=tuple(op.name for op in readers),
        read_float=bool(floats) or ops.index.is_output(tensor),
        dequantizes=int8_maker is not None and int8_maker.rule.output is not Output.EITHER,
        from_conv=producer is not None and producer.op_type == "Conv" and convs,
        to_conv=convs or any(ops.index.node(edge.node).op_type == "Conv" for edge in floats),
        paired=tensor in ops.existing.by_tensor,
    )


def _add_pairs(net: FlowNetwork, use: _TensorUse, costs: PlacementCosts) -> None:
    """The pair of one tensor: `needs int8` and `needs float` are vertices of their own, so it is paid once."""
    if use.readers:
        need = ("int8", use.tensor)
        for reader in use.readers:
            net.edge(reader, need, _INFINITE)
        net.edge(need, _SINK if use.maker is None else use.maker, costs.quantize[use.tensor])
    if not use.dequantizes or use.maker is None:
        return
    need = ("float", use.tensor)
    if use.read_float:
        net.edge(need, _SINK, _INFINITE)
    for reader in use.readers:
        net.edge(need, reader, _INFINITE)
    net.edge(use.maker, need, costs.dequantize[use.tensor])
