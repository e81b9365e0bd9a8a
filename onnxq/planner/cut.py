"""Which units run in integers: the minimum cut between the time nodes take and the time pairs take.

Each unit is int8 (1) or float (0). It costs its float or its int8 time; a tensor made in float and read in
int8 costs a QuantizeLinear, one made in int8 and read in float a DequantizeLinear, each once however many
readers. All terms are submodular, so the best assignment is a minimum s-t cut (Kolmogorov and Zabih,
"What energy functions can be minimized via graph cuts?", PAMI 2004).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxq.planner.flow import FlowNetwork
from onnxq.planner.operators import QuantizableOp, QuantizableOps
from onnxq.sites import TensorId
from onnxq.targets import Output
from onnxq.targets.costs import Cost, CpuCosts, OpCase, dequantize_us, op_cost, quantize_us

_INFINITE = 1e15
# int8 must earn this much of the float time, and this many microseconds: pairs also cost accuracy, and the
# model of the costs is no finer.
_MARGIN, _MARGIN_US = 0.03, 0.2
_SOURCE, _SINK = ("source",), ("sink",)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementCosts:
    """Predicted microseconds of every unit and of every tensor's pair, on one kind of CPU or weighted over several."""

    units: Mapping[str, Cost]
    quantize: Mapping[TensorId, float]
    dequantize: Mapping[TensorId, float]
    margin_us: float = _MARGIN_US


def add_costs(parts: Sequence[tuple[PlacementCosts, float]]) -> PlacementCosts:
    """The sum of costs of the same units, each times its weight."""

    def total(tables: Sequence[Mapping[TensorId, float]]) -> dict[TensorId, float]:
        return {key: sum(table[key] * w for table, (_, w) in zip(tables, parts, strict=True)) for key in tables[0]}

    units = {
        name: Cost(
            sum(costs.units[name].float_us * w for costs, w in parts),
            sum(costs.units[name].int8_us * w for costs, w in parts),
        )
        for name in parts[0][0].units
    }
    return PlacementCosts(
        units=units,
        quantize=total([costs.quantize for costs, _ in parts]),
        dequantize=total([costs.dequantize for costs, _ in parts]),
        margin_us=sum(costs.margin_us * w for costs, w in parts),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _TensorUse:
    """Who makes a tensor and who reads it, as the cut sees it.

    maker: the unit that makes it in integers where it is int8; None when it always comes in float. readers: units that
    may read integers. read_float: something that stays float reads it. dequantizes: its maker writes integers only.
    from_conv, to_conv: a float Conv makes it, or reads it. paired: it has a pair already, whoever runs in integers.
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
    """The choice between float and integers for every unit of a model."""

    units: QuantizableOps

    def costs(self, cpu: CpuCosts) -> PlacementCosts:
        """The costs of units and pairs on a kind of CPU."""
        uses = self._uses
        return PlacementCosts(
            units={unit.name: _find_op_cost(self.units, unit, cpu) for unit in self.units.units},
            quantize={use.tensor: _find_pair_time(use, cpu) for use in uses},
            dequantize={use.tensor: dequantize_us(use.elements, cpu, to_conv=use.to_conv) for use in uses},
        )

    def minimum_cut(self, costs: PlacementCosts, fixed: Mapping[str, bool]) -> frozenset[str]:
        """Names of the units that run in integers at the least predicted time.

        fixed: operators whose side is given (True int8, False float) by a rule or by the person.
        """
        net = FlowNetwork()
        net.vertex(_SOURCE), net.vertex(_SINK)
        for unit in self.units.units:
            cost, side = costs.units[unit.name], fixed.get(unit.name)
            int8_us = cost.int8_us + _MARGIN * cost.float_us + costs.margin_us * unit.rule.compute
            net.edge(unit.name, _SINK, _INFINITE if side is False else int8_us)
            net.edge(_SOURCE, unit.name, _INFINITE if side is True else cost.float_us)
            if not unit.rule.compute:
                self._follow(net, unit, fixed)
        for use in self._uses:
            _add_pairs(net, use, costs)
        reached = net.source_side(_SOURCE, _SINK)
        return frozenset(unit.name for unit in self.units.units if net.names[unit.name] in reached)

    def time_us(self, costs: PlacementCosts, chosen: frozenset[str]) -> float:
        """Predicted time of all units with their pairs when `chosen` run in integers."""
        total = 0.0
        for name, cost in costs.units.items():
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
        seen: dict[TensorId, None] = {}
        for unit in self.units.units:
            seen.update(dict.fromkeys((*(tensor for _, tensor in unit.data), unit.out)))
        uses = (_describe_use(self.units, tensor) for tensor in seen)
        return tuple(use for use in uses if use is not None)

    def _follow(self, net: FlowNetwork, unit: QuantizableOp, fixed: Mapping[str, bool]) -> None:
        """Adding, pooling and moving never start a quantized region: their inputs must be quantized without them.

        Otherwise a few saved bytes would put noise on tensors (attention, residual streams) nobody needs in integers.
        """
        for _, tensor in unit.data:
            maker = self.units.by_out.get(tensor)
            if maker is not None and maker.rule.output is not Output.FLOAT and fixed.get(maker.name) is not False:
                net.edge(unit.name, maker.name, _INFINITE)
                continue
            consumers = self.units.consumers(tensor)
            readers = [other for _, other in consumers if other is not None and other.rule.compute]
            net.edge(unit.name, readers[0].name if readers else _SINK, _INFINITE)


def _find_op_cost(units: QuantizableOps, unit: QuantizableOp, cpu: CpuCosts) -> Cost:
    """Predicted float and int8 time of a unit, its folded activation included."""
    candidate = units.candidate(unit.node)
    case = OpCase(
        op_type=unit.node.op_type,
        inputs=tuple(candidate.shape_of(tensor) for _, tensor in unit.data),
        output=candidate.output_shape(),
        weight=None if unit.rule.weight is None else candidate.shape(unit.rule.weight),
        group=int(candidate.attr("group", 1)),
        kernel=tuple(candidate.attr("kernel_shape", ())),
        strides=tuple(candidate.attr("strides", ())),
        activation=unit.activation.op_type if unit.activation is not None else "",
    )
    return op_cost(case, cpu)


def _describe_use(units: QuantizableOps, tensor: TensorId) -> _TensorUse | None:
    maker = units.by_out.get(tensor)
    consumers = units.consumers(tensor)
    readers = [unit for _, unit in consumers if unit is not None]
    some = maker or (readers[0] if readers else None)
    if some is None:
        return None
    floats = [edge for edge, unit in consumers if unit is None]
    shape = units.candidate(some.node).shape_of(tensor)
    convs = any(unit.node.op_type == "Conv" for unit in readers)
    producer = units.index.producer(tensor) if maker is None else maker.node
    int8_maker = maker if maker is not None and maker.rule.output is not Output.FLOAT else None
    return _TensorUse(
        tensor=tensor,
        elements=None if shape is None else math.prod(shape),
        maker=None if int8_maker is None else int8_maker.name,
        readers=tuple(unit.name for unit in readers),
        read_float=bool(floats) or units.index.is_output(tensor),
        dequantizes=int8_maker is not None and int8_maker.rule.output is not Output.EITHER,
        from_conv=producer is not None and producer.op_type == "Conv" and convs,
        to_conv=convs or any(units.index.node(edge.node).op_type == "Conv" for edge in floats),
        paired=tensor in units.existing.by_tensor,
    )


def _find_pair_time(use: _TensorUse, cpu: CpuCosts) -> float:
    """Predicted time of a QuantizeLinear; one that the model came with runs in any case."""
    return 0.0 if use.paired else quantize_us(use.elements, cpu, from_conv=use.from_conv)


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
