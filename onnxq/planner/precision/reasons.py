"""Nodes with a reason to compute in float32 beside others that do not: by type, engine, rule, or what samples show."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from onnxq.backends import Candidate, Target
from onnxq.graph import GraphIndex, NodeRef, walk_from
from onnxq.graph.base import COUNTING_OPS, DEQUANTIZE, LAYOUT_OPS, MICROSOFT, QUANTIZE
from onnxq.graph.precision.narrow import (
    CONTROL,
    Binding,
    bind_types,
    holds_scale,
    is_exact,
    is_float32,
)
from onnxq.plan import KeepReason, KeptFloat32, Plan
from onnxq.planner.requests import Requests
from onnxq.sites import Edge, TensorId
from onnxq.spec import FloatType


@dataclass(frozen=True, kw_only=True)
class TensorErrors:
    """Range of a float32 tensor, and errors of narrow types in it, on samples.

    low, high: its range. power: its squares summed. inputs_noise: squared errors of the node that makes it when it
    reads rounded tensors. own_noise: those of rounding the tensor itself. count: elements of the node's first input for
    each of the tensor.
    """

    low: float
    high: float
    power: float
    inputs_noise: float
    own_noise: float
    count: float

    @property
    def peak(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def inputs_db(self) -> float:
        """SQNR in dB of the node with rounded inputs; inf where nothing changes."""
        return _compute_db(self.power, self.inputs_noise)

    @property
    def own_db(self) -> float:
        """SQNR in dB of the rounded tensor."""
        return _compute_db(self.power, self.own_noise)


def _compute_db(power: float, noise: float) -> float:
    if noise <= 0:
        return math.inf
    return 10.0 * math.log10(power / noise) if power > 0 and math.isfinite(noise) else -math.inf


@dataclass(frozen=True, eq=False, kw_only=True)
class PrecisionProblem:
    """Everything that the choice of float types depends on.

    index: of the prepared float32 model, with inferred types. plan: its pairs. kind: the narrow type. errors: by
    tensor, {} where nothing could be run. io: the type of float inputs and outputs. opset: that of the file.
    """

    index: GraphIndex
    plan: Plan
    kind: FloatType
    requests: Requests
    engine: Target
    errors: Mapping[TensorId, TensorErrors]
    io: Mapping[str, int] = field(default_factory=dict)
    opset: int

    @cached_property
    def bindings(self) -> Mapping[str, Binding]:
        """The nodes that have to do with float32 tensors, without pairs and nodes that hold bodies."""
        bindings = {}
        for node in self.index.nodes:
            if node.is_onnx(QUANTIZE, DEQUANTIZE, "Constant", *CONTROL):
                continue
            results = self.list_writes(node)
            if results or self.list_reads(node):
                binding = bind_types(self.index, node, self.kind.onnx_type, self.opset)
                # Shape and its like take tensors as they come, and make none.
                if results or any(follows is not None for follows in binding.inputs):
                    bindings[node.name] = binding
        return bindings

    def list_reads(self, node: NodeRef) -> list[tuple[int, TensorId]]:
        """The float32 inputs of a node, constants too."""
        tensors = enumerate(self.index.list_inputs(node))
        return [
            (k, tensor)
            for k, tensor in tensors
            if tensor is not None and is_float32(self.index, tensor)
        ]

    def list_writes(self, node: NodeRef) -> list[TensorId]:
        """The float32 outputs of a node."""
        return [tensor for tensor in node.results if is_float32(self.index, tensor)]

    @cached_property
    def paired(self) -> frozenset[Edge]:
        """Inputs that read a dequantized tensor, which comes in the type they compute in."""
        sites = self.plan.all_sites
        return frozenset(edge for site in sites for edge in site.find_sure_readers(self.index))


# Other samples may have values so many times as large as those that were measured.
MARGIN = 4.0
# A node that loses so many dB beside the type's own rounding, 74 dB for 11 digits, computes something else in it: those
# of six networks lose 18 at most.
_LOSS_DB = 28.0
# Of a value that is anywhere between two levels: 6.02 dB a digit and this.
_DITHER_DB = 7.8
_DIGITS = {FloatType.FLOAT16: 11, FloatType.BFLOAT16: 8}
# Their sums may leave the type where their results do not: mean times count, and the square of a norm.
_MEANS = ("ReduceMean", "GlobalAveragePool", "AveragePool", "Mean")
# A mask keeps its meaning through these, on its way to a Softmax.
_PASSING = LAYOUT_OPS | {
    "Add",
    "Where",
    "Expand",
    "Slice",
    "Concat",
    "Gather",
    "Tile",
    "Cast",
    "Split",
}
# What an epsilon is added for.
_DIVIDING = (
    "Sqrt",
    "Reciprocal",
    "Div",
    "Log",
    "Pow",
    "Max",
    "Clip",
    "Expand",
    "Identity",
    "Unsqueeze",
)
# Share of the smallest normal number that rounds to 0.
_ZERO = 2.0**-11
_TABLES = ("Gather", "GatherElements", "GatherND", "Slice")
# Inputs that attention in one node adds to the scores in front of its Softmax.
_SCORE_MASKS = {
    ("", "Attention"): 3,
    (MICROSOFT, "Attention"): 5,
    (MICROSOFT, "MultiHeadAttention"): 5,
    (MICROSOFT, "GroupQueryAttention"): 10,
}


class ReasonSearch:
    """Nodes that have a reason to compute in float32; of several reasons the first one found holds."""

    def __init__(self, problem: PrecisionProblem) -> None:
        self.problem = problem
        self.index = problem.index
        self.errors = problem.errors
        self.kind = problem.kind
        self.nodes = [problem.index.find_node(name) for name in problem.bindings]
        self.kept: dict[str, KeptFloat32] = {}
        # Tensors that nothing but attention uses, as its mask.
        self.masks: dict[TensorId, bool] = {}

    def find_kept(self) -> dict[str, KeptFloat32]:
        """All such nodes, with the reason of each."""
        for node in self.nodes:
            self._check_operator(node, self.problem.bindings[node.name])
        self._check_shapes()
        for node in self.nodes:
            self._check_constants(node)
            self._check_vanishing(node)
        for tensor, errors in self.errors.items():
            self._check_tensor(tensor, errors)
        for tensor, errors in self.errors.items():
            self._check_inputs(tensor, errors)
        self._check_scales()
        self._check_unseen()
        return self.kept

    def _keep_wide(
        self, name: str, reason: KeepReason, figure: float = 0.0, detail: str = ""
    ) -> None:
        if name in self.problem.bindings and name not in self.kept:
            self.kept[name] = KeptFloat32(
                node=name, reason=reason, figure=round_figure(figure), detail=detail
            )

    def _check_operator(self, node: NodeRef, binding: Binding) -> None:
        """ONNX, the engine, and the person's rules."""
        problem = self.problem
        fixed = False in binding.inputs and True not in binding.inputs
        if not binding.able and (fixed or problem.list_writes(node)):
            self._keep_wide(node.name, KeepReason.ONNX)
        detail = problem.engine.refuse_narrow(Candidate(node, problem.index, {}), problem.kind)
        if detail:
            self._keep_wide(node.name, KeepReason.KERNEL, detail=detail)
        rule = problem.requests.find_wide_rule(node)
        if rule is not None:
            self._keep_wide(node.name, KeepReason.RULE, detail=rule.describe())

    def _check_shapes(self) -> None:
        """Arithmetic on shapes and positions, which must stay exact: made of shapes, or about to be whole numbers."""
        index = self.index
        shapes = set[TensorId]()
        for node in index.nodes:
            computed = index.list_computed(node).values()
            # Positions that select rows of a table make no row a position.
            table = node.op_type in _TABLES and bool(self.problem.list_writes(node))
            follows = computed and not table and shapes.issuperset(computed)
            if node.op_type in ("Shape", "Size") or follows:
                shapes.update(node.results)
                self._keep_wide(node.name, KeepReason.SHAPES)
        for node in index.nodes:
            if node.op_type == "Cast" and not is_float32(index, node.result):
                for _, tensor in self.problem.list_reads(node):
                    self._keep_counting(tensor)

    def _keep_counting(self, tensor: TensorId) -> None:
        waiting = [tensor]
        while waiting:
            node = self.index.find_producer(waiting.pop())
            if node is not None and node.op_type in COUNTING_OPS and node.name not in self.kept:
                self._keep_wide(node.name, KeepReason.SHAPES)
                waiting += [source for _, source in self.problem.list_reads(node)]

    def _check_constants(self, node: NodeRef) -> None:
        """Constants beyond the type, but masks, which are limited where they are read."""
        largest = self.kind.largest
        for k, tensor in self.problem.list_reads(node):
            value = self.index.find_constant(tensor)
            if value is None or not value.size or node.make_edge(k) in self.problem.paired:
                continue
            low = float(np.nanmin(value))
            high = float(np.nanmax(value))
            if max(-low, high) > largest and not (high <= largest and self._passes_mask(node)):
                self._keep_wide(node.name, KeepReason.OVERFLOW, low if -low > high else high)

    def _check_vanishing(self, node: NodeRef) -> None:
        """A number beside a tensor that becomes 0, such as the epsilon of a root: kept up to the quotient."""
        for _, tensor in self.problem.list_reads(node):
            value = self.index.find_constant(tensor)
            if value is None or value.size != 1:
                continue
            number = float(value.item())
            if not 0 < abs(number) < _ZERO * self.kind.smallest:
                continue
            for reader in walk_from([node], self._list_dividing):
                self._keep_wide(reader.name, KeepReason.SMALL, number)

    def _list_dividing(self, node: NodeRef) -> list[NodeRef]:
        """The nodes that read what a node makes on its way to a quotient, but those with a reason of their own."""
        return [
            reader
            for result in self.problem.list_writes(node)
            for reader in self.index.readers(result)
            if reader.op_type in _DIVIDING and reader.name not in self.kept
        ]

    def _passes_mask(self, node: NodeRef) -> bool:
        """True where a mask among the inputs of this node is a mask in its result."""
        results = self.problem.list_writes(node)
        return node.op_type in _PASSING and all(map(self._leads_to_softmax, results))

    def _leads_to_softmax(self, tensor: TensorId) -> bool:
        """True when only a Softmax, or attention as its mask, uses the tensor: there only what is large counts."""
        if tensor not in self.masks:
            edges = self.index.list_consumers(tensor)
            # While its readers are looked at, which may lead back here through a loop of bodies.
            self.masks[tensor] = False
            if edges and not self.index.is_output(tensor):
                self.masks[tensor] = all(map(self._uses_mask, edges))
        return self.masks[tensor]

    def _uses_mask(self, edge: Edge) -> bool:
        node = self.index.find_node(edge.node)
        ends = _SCORE_MASKS.get((node.domain, node.op_type)) == edge.index
        return node.op_type == "Softmax" or ends or self._passes_mask(node)

    def _is_mask(self, tensor: TensorId, errors: TensorErrors) -> bool:
        limit = self.kind.largest / MARGIN
        return errors.low < -limit and errors.high <= limit and self._leads_to_softmax(tensor)

    def _check_tensor(self, tensor: TensorId, errors: TensorErrors) -> None:
        """Range and rounding of one tensor, and the sum that makes it."""
        kind = self.kind
        maker = self.index.find_producer(tensor)
        if self._is_mask(tensor, errors):
            if maker is not None and not self._passes_mask(maker):
                self._keep_wide(maker.name, KeepReason.OVERFLOW, errors.low)
            return
        if self._is_lost(errors):
            reason = (
                KeepReason.OVERFLOW if errors.peak > kind.smallest * MARGIN else KeepReason.SMALL
            )
            # The node that makes it and all that read it.
            for node in (maker, *self.index.readers(tensor)):
                if node is not None:
                    self._keep_wide(node.name, reason, errors.peak)
        total = 0.0 if maker is None else _find_sum(maker, errors)
        if maker is not None and total > kind.largest / MARGIN:
            self._keep_wide(maker.name, KeepReason.SUM, total)

    def _is_lost(self, errors: TensorErrors) -> bool:
        """True for a tensor beyond the type's normal numbers, at either end."""
        kind = self.kind
        return errors.peak > kind.largest / MARGIN or 0 < errors.peak < kind.smallest * MARGIN

    def _check_inputs(self, tensor: TensorId, errors: TensorErrors) -> None:
        """The node that makes a tensor, when it reads rounded ones: those that are lost anyway are no reason."""
        maker = self.index.find_producer(tensor)
        worst = min(errors.inputs_db, errors.own_db)
        # 6 dB for each binary digit of the type.
        least = 20.0 * math.log10(2.0) * _DIGITS[self.kind] + _DITHER_DB - _LOSS_DB
        if maker is None or worst >= least or maker.name in self.kept:
            return
        read = [source for _, source in self.problem.list_reads(maker)]
        if any(
            self._is_lost(self.errors[known]) for known in (tensor, *read) if known in self.errors
        ):
            return
        reason = KeepReason.PRECISION
        figure = worst
        # Rounded inputs made inf or NaN, such as 0 times a mask's lowest number, whatever the result should be.
        if not math.isfinite(worst):
            reason = KeepReason.OVERFLOW
            figure = max(errors.peak, self.kind.largest)
        self._keep_wide(maker.name, reason, figure)
        for source in read:
            if (before := self.index.find_producer(source)) is not None:
                self._keep_wide(before.name, reason, figure)

    def _check_scales(self) -> None:
        """Readers of pairs whose scales the type does not hold, or must not change."""
        narrow = self.kind.onnx_type
        for site in self.problem.plan.existing:
            if site.qparams is None or not is_exact(site.qparams.scale, narrow):
                for edge in site.named_consumers:
                    self._keep_wide(edge.node, KeepReason.EXISTING)
        for site in self.problem.plan.sites:
            scale = None if site.qparams is None else site.qparams.scale
            if scale is None or holds_scale(scale, narrow, weight=site.role.is_constant):
                continue
            for edge in site.find_readers(self.index):
                self._keep_wide(edge.node, KeepReason.SCALE, float(scale.min()))

    def _check_unseen(self) -> None:
        """Nodes in branches that no sample ran, of which nothing is known."""
        for node in self.nodes if self.errors else ():
            results = self.problem.list_writes(node)
            known = (tensor in self.errors or self.index.is_constant(tensor) for tensor in results)
            if results and not any(known):
                self._keep_wide(node.name, KeepReason.UNSEEN)

    def list_limited(self, node: NodeRef) -> Iterator[Edge]:
        """The inputs of a narrow node that read a mask."""
        for k, tensor in self.problem.list_reads(node):
            value = self.index.find_constant(tensor)
            if value is None:
                errors = self.errors.get(tensor)
                limited = errors is not None and self._is_mask(tensor, errors)
            else:
                limited = bool(value.size) and float(np.nanmin(value)) < -self.kind.largest
            if limited:
                yield node.make_edge(k)


def round_figure(figure: float) -> float:
    """Three digits, for people. Infinity and NaN, which a plan's JSON cannot say, become float32's greatest number."""
    most = float(np.finfo(np.float32).max)
    return float(f"{np.nan_to_num(figure, nan=most, posinf=most, neginf=-most):.3g}")


def _find_sum(node: NodeRef, errors: TensorErrors) -> float:
    """The magnitude that the node's sum may reach on its way to its result."""
    if node.op_type in _MEANS:
        return errors.peak * max(errors.count, 1.0)
    return errors.peak**2 if node.op_type == "ReduceL2" else 0.0
