"""The tensors that two models and an optimized graph have in common, read without changing any run.

Marking a tensor as an output would keep ORT from fusing over it. So the run with all optimizations is read in the graph
ORT has already made: its fusions are done, and it computes the tensors that survived them. A tensor inside a fused
kernel is compared at its quantizer's output, which survives, as real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from onnxq.engines.diff.levels import Array, Level, find_level
from onnxq.graph import GraphIndex, NodeRef
from onnxq.plan.names import DEQUANTIZE, DYNAMIC, QUANTIZE, is_clipped_part
from onnxq.sites import TensorId

Values = Mapping[str, Array]

_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE, 0}
)
# Types that numpy and ORT exchange; sub-byte and float8 tensors stay inside.
_INTEGERS = frozenset(
    {onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16, 0}
)
# Better than this is as good as exact: drops are counted from here.
_EXACT_DB = 60.0


@dataclass(frozen=True)
class Counterpart:
    """A tensor of the quantized file that stands for a matched one: by name, with its level if it may hold integers."""

    tensor: str
    level: Level | None

    def read(self, values: Values, level: Level | None = None) -> Array | None:
        """Its real values in a run; None when the run lacks it. level: of its integers there, where it is another."""
        value = values.get(self.tensor)
        if value is None or value.dtype.kind not in "fiu":
            return None
        if value.dtype.kind == "f":
            return value
        known = level or self.level
        return None if known is None else known.to_real(value)


@dataclass(frozen=True)
class MatchedTensor:
    """A tensor of the quantized file's main graph."""

    name: str
    node: NodeRef
    # The float model's name for it, "" when it has none.
    reference: str
    # Itself, then its quantizers' outputs: these survive when a fused kernel swallows the tensor.
    counterparts: tuple[Counterpart, ...]

    @property
    def step(self) -> float:
        """One quantization step of the tensor's first quantizer, 0 without one."""
        return next((one.level.scale for one in self.counterparts if one.level is not None), 0.0)


def match_tensors(float_index: GraphIndex, index: GraphIndex) -> tuple[MatchedTensor, ...]:
    """Every float tensor that a node of the quantized main graph makes, in the order of the network.

    Tensors computed from weights alone are left out, and the results of DequantizeLinear: they are their source again.
    """
    known = {name for node in float_index.nodes if not node.scope for name in node.outputs}
    quantizers: dict[str, list[NodeRef]] = {}
    for node in index.nodes:
        if node.op_type == QUANTIZE and not node.scope:
            quantizers.setdefault(find_source(index, node.inputs[0]), []).append(node)
    found = []
    live = _find_data_nodes(index)
    for node in index.nodes:
        own = node.op_type not in (QUANTIZE, DEQUANTIZE, "Constant") and not _is_quantizer_clip(index, node)
        for name in filter(None, node.outputs if own and node.name in live else ()):
            if index.dtype(TensorId(name)) not in _FLOATS or index.is_constant(TensorId(name)):
                continue
            makers = quantizers.get(name, [])
            stored = [q.outputs[0] for q in makers if index.dtype(q.result) in _INTEGERS]
            levels = [Counterpart(tensor, find_level(index, tensor)) for tensor in stored]
            # An exporter that quantizes an output gives the dequantized tensor the float one's name.
            names = [name, *(after for q in makers for after in _find_dequantized(index, q))]
            reference = next((one for one in names if one in known), "")
            cut = levels and _lacks_activation(float_index, reference, node)
            found.append(MatchedTensor(name, node, reference, (*(() if cut else (Counterpart(name, None),)), *levels)))
    return tuple(found)


def _lacks_activation(float_index: GraphIndex, reference: str, node: NodeRef) -> bool:
    """True where a tool took out a Relu or Clip, which the range of the quantizer behind does as well.

    The node in front then makes the tensor of its name, which has the float model's values only when quantized.
    """
    maker = float_index.producer(TensorId(reference))
    return maker is not None and maker.op_type in ("Relu", "Clip") and node.op_type != maker.op_type


def _find_data_nodes(index: GraphIndex) -> set[str]:
    """The main graph's nodes that depend on an input; the rest is weights, whatever is computed from them first."""
    tensors = {value.name for value in index.inputs}
    found = set()
    for node in index.nodes:
        if not node.scope and (index.subgraphs(node.name) or tensors.intersection(node.inputs)):
            found.add(node.name)
            tensors.update(node.outputs)
    return found


def find_source(index: GraphIndex, tensor: str) -> str:
    """The float tensor behind one: through a pair and the Clip that narrows its range."""
    for _ in range(len(index.nodes) + 1):
        node = index.producer(TensorId(tensor))
        if node is None or not (node.op_type in (QUANTIZE, DEQUANTIZE) or _is_quantizer_clip(index, node)):
            return tensor
        tensor = node.inputs[0]
    return tensor


def _is_quantizer_clip(index: GraphIndex, node: NodeRef) -> bool:
    """A Clip that narrows a quantizer's range, known by its name: nothing else reads it."""
    if node.op_type != "Clip" or node.scope or index.is_output(node.result):
        return False
    readers = {reader.op_type for reader in index.readers(node.result)}
    return readers in ({QUANTIZE}, {DYNAMIC}) and is_clipped_part(node.outputs[0])


def _find_dequantized(index: GraphIndex, quantizer: NodeRef) -> list[str]:
    return [node.outputs[0] for node in index.readers(quantizer.result) if node.op_type == DEQUANTIZE]


def find_losses(
    index: GraphIndex, made: Iterable[MatchedTensor], sqnr: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """By tensor: (SQNR of the worst tensor its node reads, its own), from tensors with one; within 60 dB of zero.

    A tensor without an SQNR has that of its worst input; model inputs and constants are exact.
    """
    found: dict[str, tuple[float, float]] = {}
    for row in made:
        inputs = (found.get(find_source(index, name)) for name in row.node.inputs if name)
        before = min((one[1] for one in inputs if one is not None), default=_EXACT_DB)
        own = sqnr.get(row.name, math.nan)
        found[row.name] = (before, before if math.isnan(own) else min(max(own, -_EXACT_DB), _EXACT_DB))
    return found
