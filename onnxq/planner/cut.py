"""Which units run in integers: the minimum cut between the time nodes take and the time pairs take.

Each unit is int8 (1) or float (0). It costs its float or its int8 time; a tensor made in float and read in
int8 costs a QuantizeLinear, one made in int8 and read in float a DequantizeLinear, each once however many
readers. All terms are submodular, so the best assignment is a minimum s-t cut (Kolmogorov and Zabih,
"What energy functions can be minimized via graph cuts?", PAMI 2004).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxq.planner.flow import FlowNetwork
from onnxq.planner.units import Unit, Units
from onnxq.sites import TensorId
from onnxq.targets import Output
from onnxq.targets.ort_costs import Cost, OpCase, dequantize_us, op_cost, quantize_us

_INFINITE = 1e15
# int8 must earn this much of the float time, and this many microseconds: pairs also cost accuracy, and the
# model of the costs is no finer.
_MARGIN, _MARGIN_US = 0.03, 0.2


def unit_cost(units: Units, unit: Unit) -> Cost:
    """Predicted float and int8 time of a unit, its folded activation included."""
    candidate = units.candidate(unit.node)
    weight = None if unit.rule.weight is None else candidate.shape(unit.rule.weight)
    return op_cost(
        OpCase(
            op_type=unit.node.op_type,
            inputs=tuple(units.candidate(unit.node).shape_of(tensor) for _, tensor in unit.data),
            output=candidate.output_shape(),
            weight=weight,
            group=int(candidate.attr("group", 1)),
            kernel=tuple(candidate.attr("kernel_shape", ())),
            strides=tuple(candidate.attr("strides", ())),
            activation=unit.activation.op_type if unit.activation is not None else "",
        )
    )


def elements(units: Units, unit: Unit, tensor: TensorId) -> int | None:
    """Number of elements of a tensor; None when its shape is unknown."""
    shape = units.candidate(unit.node).shape_of(tensor)
    return None if shape is None else math.prod(shape)


def minimum_cut(units: Units, fixed: Mapping[str, bool]) -> frozenset[str]:
    """Names of the units that run in integers at the least predicted time.

    fixed: units whose side is settled (True int8, False float) by a rule or by the person.
    """
    net = FlowNetwork()
    source, sink = ("source",), ("sink",)
    net.vertex(source), net.vertex(sink)
    for unit in units.units:
        cost = unit_cost(units, unit)
        settled = fixed.get(unit.name)
        net.edge(
            unit.name,
            sink,
            _INFINITE if settled is False else cost.int8_us + _MARGIN * cost.float_us + _MARGIN_US * unit.rule.compute,
        )
        net.edge(source, unit.name, _INFINITE if settled is True else cost.float_us)
        if not unit.rule.compute:
            _follow(net, units, unit, fixed, sink)
    for tensor in _tensors(units):
        _tensor_edges(net, units, tensor, source, sink)
    side = net.source_side(source, sink)
    return frozenset(unit.name for unit in units.units if net.names[unit.name] in side)


def _follow(net: FlowNetwork, units: Units, unit: Unit, fixed: Mapping[str, bool], sink: object) -> None:
    """Adding, pooling and moving never start a quantized region: what they read must be quantized without them.

    Otherwise a few saved bytes would put noise on tensors (attention, residual streams) nobody needs in integers.
    """
    for _, tensor in unit.data:
        maker = units.by_out.get(tensor)
        if maker is not None and maker.rule.output is not Output.FLOAT and fixed.get(maker.name) is not False:
            net.edge(unit.name, maker.name, _INFINITE)
            continue
        readers = [other for _, other in units.consumers(tensor) if other is not None and other.rule.compute]
        net.edge(unit.name, readers[0].name if readers else sink, _INFINITE)


def _tensors(units: Units) -> list[TensorId]:
    seen: dict[TensorId, None] = {}
    for unit in units.units:
        for _, tensor in unit.data:
            seen[tensor] = None
        seen[unit.out] = None
    return list(seen)


def _tensor_edges(net: FlowNetwork, units: Units, tensor: TensorId, source: object, sink: object) -> None:
    """The pair of one tensor: `needs int8` and `needs float` are vertices of their own, so it is paid once."""
    maker = units.by_out.get(tensor)
    readers = units.consumers(tensor)
    integer = [unit for _, unit in readers if unit is not None]
    some = maker or (integer[0] if integer else None)
    if some is None:
        return
    count = elements(units, some, tensor)
    writes_float = maker is None or maker.rule.output is Output.FLOAT
    made_by = sink if writes_float or maker is None else maker.name
    if integer:
        feeds_conv = any(unit.node.op_type == "Conv" for unit in integer)
        need = ("int8", tensor)
        for unit in integer:
            net.edge(unit.name, need, _INFINITE)
        net.edge(need, made_by, quantize_us(count, from_conv=_is_conv(units, tensor, maker) and feeds_conv))
    if maker is None or writes_float or maker.rule.output is Output.EITHER:
        return
    need = ("float", tensor)
    floats = [edge for edge, unit in readers if unit is None]
    if floats or units.index.is_output(tensor):
        net.edge(need, sink, _INFINITE)
    for unit in integer:
        net.edge(need, unit.name, _INFINITE)
    to_conv = any(units.index.node(edge.node).op_type == "Conv" for edge in floats) or any(
        unit.node.op_type == "Conv" for unit in integer
    )
    net.edge(maker.name, need, dequantize_us(count, to_conv=to_conv))


def _is_conv(units: Units, tensor: TensorId, maker: Unit | None) -> bool:
    if maker is not None:
        return maker.node.op_type == "Conv"
    producer = units.index.producer(tensor)
    return producer is not None and producer.op_type == "Conv"
