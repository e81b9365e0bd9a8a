"""Which tensors inside two models and an optimized graph are the same, and how they are read without changing any run.

Marking a tensor as an output would keep ORT from fusing over it. So the run with all optimizations is read in the graph
ORT has already made: its fusions are done, and the tensors that survived them are what it computes. What a fused kernel
swallows is compared at its quantizer's output, which survives, as real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.engines.diff.levels import Level, level_of
from onnxq.graph import GraphIndex, NodeRef
from onnxq.sites import TensorId

Array = NDArray[np.generic]
Values = Mapping[str, Array]

_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE, 0}
)
# What numpy and ORT hand to each other; sub-byte and float8 tensors stay inside.
_INTEGERS = frozenset(
    {onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16, 0}
)
# Better than this is as good as exact: drops are counted from here.
_EXACT_DB = 60.0


@dataclass(frozen=True)
class Place:
    """One tensor of the quantized file that stands for a row: by name, with its level if it may hold integers."""

    tensor: str
    level: Level | None

    def read(self, values: Values, level: Level | None = None) -> Array | None:
        """Its real values in a run; None when the run has not got it. level: what integers mean there, if not here."""
        value = values.get(self.tensor)
        if value is None or value.dtype.kind not in "fiu":
            return None
        if value.dtype.kind == "f":
            return value
        known = level or self.level
        return None if known is None else known.real(value)


@dataclass(frozen=True)
class Row:
    """A tensor of the quantized file's main graph. reference: the float model's name for it, "" when it has none.

    places: itself, then its quantizers' outputs. step: of its first quantizer, 0 without one.
    """

    name: str
    node: NodeRef
    reference: str
    places: tuple[Place, ...]

    @property
    def step(self) -> float:
        """One level of the tensor's quantizer."""
        return next((place.level.scale for place in self.places if place.level is not None), 0.0)


def rows(float_index: GraphIndex, index: GraphIndex) -> tuple[Row, ...]:
    """Every float tensor that a node of the quantized main graph makes, in the order of the network.

    What is computed from weights alone is left out, and so is what a DequantizeLinear makes: that is its source again.
    """
    known = {name for node in float_index.nodes if not node.scope for name in node.outputs}
    quantizers: dict[str, list[NodeRef]] = {}
    for node in index.nodes:
        if node.op_type == "QuantizeLinear" and not node.scope:
            quantizers.setdefault(source(index, node.inputs[0]), []).append(node)
    found = []
    live = _live(index)
    for node in index.nodes:
        if (
            node.name not in live
            or node.op_type in ("QuantizeLinear", "DequantizeLinear", "Constant")
            or _clips(index, node)
        ):
            continue
        for name in node.outputs:
            tensor = TensorId(name)
            if not name or index.dtype(tensor) not in _FLOATS or index.is_constant(tensor):
                continue
            makers = quantizers.get(name, [])
            stored = [q.outputs[0] for q in makers if index.dtype(TensorId(q.outputs[0])) in _INTEGERS]
            places = [Place(name, None), *(Place(tensor, level_of(index, tensor)) for tensor in stored)]
            names = [name, *(after for q in makers for after in _dequantized(index, q))]
            reference = next((one for one in names if one in known), "")
            found.append(Row(name, node, reference, tuple(places)))
    return tuple(found)


def _live(index: GraphIndex) -> set[str]:
    """The main graph's nodes that depend on an input; the rest is weights, whatever is computed from them first."""
    tensors = {value.name for value in index.inputs}
    found = set()
    for node in index.nodes:
        if not node.scope and (index.bodies(node.name) or tensors.intersection(node.inputs)):
            found.add(node.name)
            tensors.update(node.outputs)
    return found


def source(index: GraphIndex, tensor: str) -> str:
    """The float tensor behind one: through a pair and the Clip that narrows its range."""
    for _ in range(len(index.nodes) + 1):
        node = index.producer(TensorId(tensor))
        if node is None or not (node.op_type in ("QuantizeLinear", "DequantizeLinear") or _clips(index, node)):
            return tensor
        tensor = node.inputs[0]
    return tensor


def _clips(index: GraphIndex, node: NodeRef) -> bool:
    """A Clip that narrows a quantizer's range, told from a network's own by its name: nothing else reads it."""
    if node.op_type != "Clip" or node.scope or index.is_output(TensorId(node.outputs[0])):
        return False
    readers = [index.node(edge.node).op_type for edge in index.consumers(TensorId(node.outputs[0]))]
    return bool(readers) and set(readers) == {"QuantizeLinear"} and node.outputs[0].endswith("/clipped")


def _dequantized(index: GraphIndex, quantizer: NodeRef) -> list[str]:
    readers = (index.node(edge.node) for edge in index.consumers(TensorId(quantizer.outputs[0])))
    return [node.outputs[0] for node in readers if node.op_type == "DequantizeLinear"]


def reached(index: GraphIndex, made: Iterable[Row], sqnr: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """By row name: (SQNR of the worst tensor its node reads, its own), from rows with one; within 60 dB of zero.

    A tensor without an SQNR has that of what it is computed from; model inputs and constants are exact.
    """
    found: dict[str, tuple[float, float]] = {}
    for row in made:
        inputs = (found.get(source(index, name)) for name in row.node.inputs if name)
        before = min((one[1] for one in inputs if one is not None), default=_EXACT_DB)
        own = sqnr.get(row.name, math.nan)
        found[row.name] = (before, before if math.isnan(own) else min(max(own, -_EXACT_DB), _EXACT_DB))
    return found
