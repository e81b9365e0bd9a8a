"""16-bit sums that saturate on x86 CPUs without VNNI: how often they do, and its cost, computed on any machine.

A model that saturates is made of another one.

ONNX Runtime without optimizations computes Q/DQ files in float, exactly. Beside every product whose weight can overflow
stands the value that saturation takes off it: for each sum that can overflow, neighbours w0 and w1 of a row and the
raw quantized values x0 and x1 they meet,

    excess = clip(x0 * w0 + x1 * w1, -32768, 32767) - (x0 * w0 + x1 * w1)

summed up by rows, times the scales of data and weight, is added to the product's result. All of these are integers that
float32 holds exactly; a row's sum is rounded only beyond 2^24. Bias, activation and rounding come behind as they do in
the kernel. Quantized values are signed integers relative to the zero point where the operator pads, so padding is 0,
and raw ones behind it. int8 data that the optimizer makes uint8 has values 128 higher.
"""

import math
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.annotate.operators import Operand, find_operands, find_saturating
from onnxq.arrays import ArrayDict, Arrays, Floats, Integers, Mask, as_float32, as_int64
from onnxq.backends.base import Data
from onnxq.evaluation.compare import MatchedRunner, ReferenceRunner, compare_models
from onnxq.graph import Editor, GraphIndex, ModelLike, infer_shapes, name_nodes
from onnxq.graph.integer_operators import NodeWriter, read_integer_operators
from onnxq.runtime import Session, tap_tensors
from onnxq.runtime.tap import Probe
from onnxq.sites import NameSet, Refusal, Refusals, TensorId

# Sums computed at a time: with 112 x 112 positions a tensor of them is 50 MB.
_CHUNK = 1024
_INT16 = np.iinfo(np.int16)
# ReduceSum takes its axes as an input from here on.
_AXES_INPUT = 13
_UNASKED = "ONNX Runtime rounds its float weight to int8 by itself: its cost is not known"
_CONV_ATTRIBUTES = ("auto_pad", "dilations", "pads", "strides")


@dataclass(frozen=True)
class Counter:
    """Where the saturating model counts for one node.

    saturated, size: tensors with how many sums overflowed, and how many values the node gave. sums: of one value.
    """

    node: str
    saturated: TensorId
    size: TensorId
    sums: float


@dataclass(frozen=True, eq=False)
class Emulation:
    """exact: the model, integer products between pairs. saturating: the same with sums that saturate.

    Both are meant for ONNX Runtime without optimizations. skipped: nodes that saturate and are not emulated.
    """

    exact: ModelLike
    saturating: ModelLike
    counters: tuple[Counter, ...]
    skipped: Refusals


def emulate_saturation(proto: ModelLike, nodes: NameSet | None = None) -> Emulation:
    """Rewrite a model. nodes: those that saturate, where more is known of their kernels than the file says.

    Raises ModelError for a model below opset 13 with integer operators that cannot be upgraded.
    """
    named = name_nodes(proto)
    if nodes is None:
        nodes = frozenset(one.node for one in find_saturating(GraphIndex(named)) if one.saturates)
    # Integer operators become products between pairs, which compute in float and have a place for
    # an excess.
    exact = infer_shapes(read_integer_operators(named, nodes))
    index = GraphIndex(exact)
    editor = Editor(exact)
    counters = []
    skipped = []
    for operand in find_operands(index):
        name = operand.node.name
        if name not in nodes or not operand.over.any():
            continue
        scale = _find_scale(index, operand)
        reason = _find_obstacle(operand)
        if scale is None or reason:
            reason = reason or "the scale of its weight is computed at run time"
            cause = f"{reason}: its cost is not known"
            skipped.append(Refusal(name, cause, rule="saturation", code="R114"))
        else:
            counters.append(_ExcessWriter(editor, index.opset, operand, scale).write())
    # What ONNX Runtime quantizes by itself has no pair in the file, and no integers to read.
    seen = {one.node for one in counters} | {one.subject for one in skipped}
    skipped += [
        Refusal(name, _UNASKED, rule="saturation", code="R114") for name in sorted(nodes - seen)
    ]
    return Emulation(exact, editor.export() if counters else exact, tuple(counters), tuple(skipped))


def _find_obstacle(operand: Operand) -> str:
    if operand.product.reads is not Data.PAIR:
        return f"{operand.node.op_type} is not emulated"
    if "Conv" not in operand.node.op_type and operand.values.ndim > 2:
        return "a product with a stack of matrices is not emulated"
    return ""


def _find_scale(index: GraphIndex, operand: Operand) -> Floats | None:
    """One factor a row, or one for all. Kernels read scales along another axis as if they were the rows'."""
    scale = None if operand.dequantize is None else index.input_value(operand.dequantize, 1)
    if scale is None or scale.size not in (1, len(operand.sums)):
        return None
    return as_float32(scale).ravel() * np.float32(operand.node.attrs.get("alpha", 1.0))


class _ExcessWriter(NodeWriter):
    """Writes the nodes of one product."""

    def __init__(self, editor: Editor[Any], opset: int, operand: Operand, scale: Floats) -> None:
        super().__init__(editor, operand.node.scope, f"{operand.node.name}/saturation")
        self.opset = opset
        self.scale = scale
        self.operand = operand
        self.node = operand.node
        self.conv = operand.node.op_type == "Conv"

    def write(self) -> Counter:
        """Add the excess to the product's result; where to read how often there was one."""
        over = self.operand.over
        inner, made = self._name_results()
        levels = self._write_levels()
        count = ""
        parts = []
        chunks = list(_split_rows(over))
        for rows, sums in chunks:
            part, found = self._write_chunk(levels, rows, sums)
            parts.append(part)
            count = self.add("Add", [count, found]) if count else found
        rows = np.concatenate([rows for rows, _ in chunks])
        self.add("Add", [inner, self._write_excess(parts, rows, inner)], output=made)
        self.editor.rewire(TensorId(inner, self.scope), made, outputs=True)
        size = self.add("Size", [made])
        return Counter(
            self.node.name,
            saturated=TensorId(count, self.scope),
            size=TensorId(size, self.scope),
            sums=over.size / max(len(over), 1),
        )

    def _name_results(self) -> tuple[str, str]:
        """Names of the exact and of the saturating result.

        In the main graph the second inherits the name: it may be an output, and is found under it inside.
        """
        made = self.node.outputs[0]
        if self.scope:
            return made, self.editor.fresh(f"{self.node.name}/saturating")
        inner = self.editor.fresh(f"{self.node.name}/exact")
        self.editor.rename_tensor(TensorId(made, self.scope), inner)
        return inner, made

    def _write_levels(self) -> str:
        """Raw quantized values that weights meet: [N, channel * taps + tap, …] of a Conv, [..., K] of a product."""
        source = self.operand.source
        # _find_obstacle has asked for both pairs.
        assert source is not None
        x = self.node.inputs[self.operand.product.data]
        scale = source.inputs[1]
        # Divided back, what DequantizeLinear wrote is an integer up to float rounding, which Round
        # takes off. It is relative to the zero point, so that padding of 0 stays right.
        found = self.add("Round", [self.add("Div", [x, scale])])
        if self.conv:
            found = self._write_im2col(found)
        elif self.node.transposes_data:
            found = self.add("Transpose", [found], perm=[1, 0])
        shift = self.constant(np.float32(128 if self.operand.data == "int8" else 0))
        if source.name_input(2):
            zero = self.add("Cast", [source.inputs[2]], to=TensorProto.FLOAT)
            shift = self.add("Add", [zero, shift])
        return self.add("Add", [found, shift])

    def _write_im2col(self, x: str) -> str:
        """Every tap of every channel as a channel of its own: a depthwise Conv with one filter a tap."""
        taps = self.operand.values.shape[2:]
        count = math.prod(taps)
        channels = self.operand.values.shape[1] * self.node.groups
        # Filter k is 1 at tap k and 0 elsewhere, so its output is the input shifted by that tap.
        units = np.eye(count, dtype=np.float32).reshape(count, 1, *taps)
        filters = np.tile(units, (channels, *[1] * (len(taps) + 1)))
        attrs = {key: self.node.attrs[key] for key in _CONV_ATTRIBUTES if key in self.node.attrs}
        return self.add(
            "Conv", [x, self.constant(filters)], **attrs, kernel_shape=taps, group=channels
        )

    def _find_gather_indices(self, rows: Integers, k: Integers) -> Integers:
        """Where the k-th weight of a row finds its quantized value."""
        if not self.conv:
            return k
        outputs, channels, *taps = self.operand.values.shape
        group = rows // (outputs // self.node.groups)
        # Kernels lay rows out as taps, then channels; the depthwise Conv above as channels, then
        # taps.
        return np.asarray((group * channels + k % channels) * math.prod(taps) + k // channels)

    def _write_chunk(self, levels: str, rows: Integers, sums: Integers) -> tuple[str, str]:
        """The excess of rows, summed up, and how many sums had any. sums: [rows, most], -1 where a row has fewer."""
        # -1 gathers the first sum instead, and its weights are multiplied by 0.
        which = np.maximum(sums, 0)
        weights = as_float32(self.operand.sums[rows[:, None], which]) * (sums >= 0)[:, :, None]
        products = []
        # A 16-bit sum is of two neighbours: kernels multiply bytes and add the products in pairs.
        for side in (0, 1):
            # The last of an odd number has no neighbour, and never overflows.
            at = self._find_gather_indices(np.repeat(rows, sums.shape[1]), 2 * which.ravel() + side)
            x = self.add("Gather", [levels, self.constant(at)], axis=1 if self.conv else -1)
            w = weights[:, :, side].reshape(
                -1, *[1] * (self.operand.values.ndim - 2 if self.conv else 0)
            )
            products.append(self.add("Mul", [x, self.constant(w)]))
        total = self.add("Add", products)
        least, most = (self.constant(np.float32(bound)) for bound in (_INT16.min, _INT16.max))
        excess = self.add("Sub", [self.add("Min", [self.add("Max", [total, least]), most]), total])
        # Any excess counts once, whatever its size.
        some = self.add(
            "Cast", [self.add("Cast", [excess], to=TensorProto.BOOL)], to=TensorProto.INT64
        )
        # 0 keeps the batch of a Conv; of a product all axes in front of K become one.
        shape = [0, len(rows), sums.shape[1], -1] if self.conv else [-1, len(rows), sums.shape[1]]
        apart = self.add("Reshape", [excess, self.constant(as_int64(shape))])
        return self._add_up(apart), self.add("ReduceSum", [some], keepdims=0)

    def _write_excess(self, parts: Sequence[str], rows: Integers, like: str) -> str:
        """Chunks of rows, -1 being one of zeros, as the product's result is laid out, in its unit."""
        found = self.add("Concat", list(parts), axis=1) if len(parts) > 1 else parts[0]
        place = np.full(len(self.operand.sums), int(np.flatnonzero(rows == -1)[0]), np.int64)
        place[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        assert self.operand.source is not None
        factor = self.scale.reshape(-1, 1) if self.conv else self.scale
        found = self.add(
            "Mul",
            [self.add("Gather", [found, self.constant(place)], axis=1), self.constant(factor)],
        )
        found = self.add("Mul", [found, self.operand.source.inputs[1]])
        return self.add("Reshape", [found, self.add("Shape", [like])])

    def _add_up(self, apart: str) -> str:
        """The sums of each row, added up: [.., rows, sums, ..] -> [.., rows, ..]."""
        if self.opset < _AXES_INPUT:
            return self.add("ReduceSum", [apart], axes=[2], keepdims=0)
        return self.add("ReduceSum", [apart, self.constant(as_int64([2]))], keepdims=0)


def _split_rows(over: Mask) -> Iterator[tuple[Integers, Integers]]:
    """(rows, their sums that can overflow [rows, most]): rows of like counts, so that few places stay empty (-1).

    The last row of the last chunk is -1, without sums: it stands for rows that cannot overflow.
    """
    counts = over.sum(axis=1)
    order = (-counts).argsort(kind="stable")
    order = as_int64(order[counts[order] > 0])
    start = 0
    while start < len(order):
        most = int(counts[order[start]])
        rows = order[start : start + max(1, _CHUNK // most)]
        start += len(rows)
        if start >= len(order):
            rows = np.append(rows, -1)
        sums = np.full((len(rows), most), -1, np.int64)
        for at, row in enumerate(rows):
            found = np.flatnonzero(over[row]) if row >= 0 else ()
            sums[at, : len(found)] = found
        yield rows, sums


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """One node on the samples: how many of the sums it computed saturated."""

    node: str
    saturated: int
    sums: int

    @property
    def share(self) -> float:
        """Of all sums of the node, 0 to 1."""
        return self.saturated / self.sums if self.sums else 0.0


@dataclass(frozen=True, kw_only=True)
class OutputCost:
    """One output: the saturating model against the exact one."""

    output: str
    # inf where no sum of a sample saturated.
    sqnr_db: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class SaturationCost:
    """The errors that CPUs without VNNI make on samples."""

    data: str = ""
    samples: int
    synthetic: bool = False
    # Those whose weights can overflow.
    nodes: tuple[NodeCost, ...]
    outputs: tuple[OutputCost, ...]
    # Those of the nodes that could not be emulated.
    skipped: Refusals

    @property
    def saturated(self) -> int:
        """Sums that saturated, of all nodes."""
        return sum(node.saturated for node in self.nodes)


def measure_saturation(
    proto: ModelLike,
    samples: Iterable[Arrays],
    *,
    nodes: NameSet | None = None,
    threads: int = 0,
) -> SaturationCost:
    """Run the model with exact and with saturating sums, both without optimizations.

    nodes: as of `emulate_saturation`. Raises DataError for samples that do not fit.
    """
    emulation = emulate_saturation(proto, nodes)
    exact = ReferenceRunner(emulation.exact, optimize=False, threads=threads, arena=False)
    taking = replace(emulation, saturating=exact.selections.take_choices(emulation.saturating))
    run = SaturatingRun(taking, threads=threads)
    pair = {"saturation": (exact, MatchedRunner(exact, run))}
    errors = compare_models(pair, samples)["saturation"]
    return SaturationCost(
        samples=errors.count,
        nodes=run.list_nodes(),
        outputs=tuple(
            OutputCost(output=output.name, sqnr_db=output.sqnr_db, max_abs=output.max_abs)
            for output in errors.results()
        ),
        skipped=(*emulation.skipped, *run.refusals),
    )


@dataclass(eq=False)
class SaturatingRun:
    """The saturating model as a session that also counts."""

    emulation: Emulation
    threads: int = 0
    # One of the main graph to give instead of the outputs.
    tensor: str = ""
    refusals: Refusals = ()
    # Of each node, by its counters' tensors.
    _totals: Counts[TensorId] = field(default_factory=Counts)

    def __post_init__(self) -> None:
        counted = [
            tensor for one in self.emulation.counters for tensor in (one.saturated, one.size)
        ]
        tapped = tap_tensors(
            self.emulation.saturating,
            [*counted, *([TensorId(self.tensor)] if self.tensor else [])],
            only=bool(self.tensor),
            probe=Probe(dtype=TensorProto.INT64),
        )
        self._counts = {one: tapped.outputs[one] for one in counted if one in tapped.outputs}
        self.refusals = tapped.refusals
        self._session = Session(tapped.proto, optimize=False, threads=self.threads, arena=False)

    def run(self, feeds: Arrays) -> ArrayDict:
        """The model's outputs, or the tensor asked for."""
        values = self._session.run(feeds)
        for tensor, output in self._counts.items():
            self._totals[tensor] += int(np.sum(values.pop(output)))
        return values

    def list_nodes(self) -> tuple[NodeCost, ...]:
        """The counts so far."""
        total = self._totals
        return tuple(
            NodeCost(
                node=one.node,
                saturated=total[one.saturated],
                sums=round(total[one.size] * one.sums),
            )
            for one in self.emulation.counters
        )
