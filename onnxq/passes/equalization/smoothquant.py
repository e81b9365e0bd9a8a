"""SmoothQuant in the graph: X/s before the linear layers that read X, s·W in them.

X is divided where that costs nothing, in the scale and bias of a LayerNormalization or in the weights of a linear
operator in front, if all that reads X is smoothed; else by one Mul on the branch that feeds the layers, where the
error of their outputs falls enough to pay for it. (A Gelu cannot take the factors in: unfolded, with a vector in place
of its constants, ORT runs it as five nodes instead of one.) Where only weights are quantized, s is AWQ's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxq.arrays import Array64, Floats, as_float32, as_float64
from onnxq.errors import PlanError
from onnxq.graph import LAYOUT_OPS, GraphIndex, ModelLike, NodeRef, get_index, release_pages
from onnxq.numerics.machine import map_in_threads
from onnxq.passes.equalization.smoothquant_core import (
    ChannelStatistics,
    SmoothedWeight,
    search_awq_exponent,
    search_smoothing_exponent,
    turn_spec,
)
from onnxq.passes.linear import Linear, find_linear
from onnxq.passes.patterns import Edit
from onnxq.plan import Plan, SitePlans
from onnxq.planner.sums import read_constant
from onnxq.sites import Names, Role, TensorId
from onnxq.spec import QuantSpec

Factors = Mapping[TensorId, Floats]
# By the name of an operator: itself, and what its weight is multiplied by.
_Turns = dict[str, tuple[Linear, list[Array64]]]
# Most that may be left of the noise of the layers' outputs, where smoothing is free and where it costs a Mul.
FREE = 0.9
MUL = 0.4


@dataclass(frozen=True, eq=False)
class SmoothingGroup:
    """Linear layers that read one tensor along its last axis. home: the node that can take 1/s in, None for a Mul."""

    tensor: TensorId
    readers: tuple[Linear, ...]
    channels: int
    home: NodeRef | Linear | None


def find_groups(index: GraphIndex) -> tuple[SmoothingGroup, ...]:
    """Every tensor whose readers are MatMul or Gemm with weights of their own, in the order the model runs in."""
    layers = defaultdict(list)
    # By their results: the operators whose weights nobody else reads.
    makers = {}
    for node in index.nodes:
        op = find_linear(index, node) if node.is_onnx("MatMul", "Gemm") else None
        if op is None:
            continue
        if op.owns_constants(index):
            makers[op.last.result] = op
        x = index.find_input(node, 0)
        w = index.find_input(node, 1)
        owned = w is not None and index.is_owned(w)
        if x is not None and owned and x.scope == node.scope and not node.transposes_data:
            layers[x].append(op)
    groups = []
    for tensor, ops in layers.items():
        sizes = {op.weight.shape[1 - op.axis] for op in ops}
        if len(sizes) == 1 and all(op.weight.dtype == np.float32 for op in ops):
            channels = sizes.pop()
            private = index.are_private([tensor], {op.node.name for op in ops})
            home = _find_home(index, tensor, channels, makers) if private else None
            groups.append(SmoothingGroup(tensor, tuple(ops), channels, home))
    return tuple(groups)


# The way of an attention's values: to heads, in front of the tokens, times P, behind them again, and joined; so that
# the channels come out in the order they went in.
_VALUES_WAY = ("Reshape", "Transpose", "MatMul", "Transpose", "Reshape")
# [batch, heads, tokens, size] to [batch, tokens, heads, size], and back.
_HEADS_PERM = (0, 2, 1, 3)


def _find_home(
    index: GraphIndex, tensor: TensorId, channels: int, makers: Mapping[TensorId, Linear]
) -> NodeRef | Linear | None:
    """The node that can write a tensor of so many channels divided: it makes the tensor, or an attention's values."""
    norm = index.find_onnx_producer(tensor, "LayerNormalization")
    if norm is not None:
        # Over the last axis, with a scale of its own.
        axis = norm.read_int("axis", -1)
        rank = index.find_rank(norm.result)
        scale, bias = (index.find_input(norm, k) for k in (1, 2))
        constants = [tensor for tensor in (scale, bias) if tensor is not None]
        own = all(index.is_constant(tensor) and index.is_owned(tensor) for tensor in constants)
        last = axis == -1 or (rank is not None and axis == rank - 1)
        return norm if norm.result == tensor and own and scale is not None and last else None
    if tensor in makers:
        return makers[tensor]
    split = tensor
    for op_type in reversed(_VALUES_WAY):
        node = index.find_onnx_producer(tensor, op_type)
        split = tensor
        source = index.find_input(node, int(op_type == "MatMul"))
        # Another reader would see values that nobody multiplies back.
        if node is None or source is None or index.find_reader(source) is None:
            return None
        if op_type == "Transpose" and tuple(node.attrs.get("perm", ())) != _HEADS_PERM:
            return None
        tensor = source
    whole, parts = (index.find_shape(t) or () for t in (tensor, split))
    # The heads are often known by their size alone; then the split must leave the other axes as they are.
    if len(whole) != 3 or None in whole or len(parts) != 4 or whole[:2] != parts[:2]:
        return None
    op = makers.get(tensor)
    head = parts[-1]
    fits = isinstance(head, int) and head > 0 and channels % head == 0
    return op if op is not None and fits and op.channels == channels else None


def find_quantized_groups(proto: ModelLike, plan: Plan) -> tuple[SmoothingGroup, ...]:
    """The groups whose activation and weights the plan quantizes, all of them, where 1/s has a place to go."""
    return tuple(group for group, *_ in _find_specs(get_index(proto), plan))


def _find_specs(
    index: GraphIndex, plan: Plan
) -> Iterator[tuple[SmoothingGroup, QuantSpec | None, SitePlans]]:
    """Each such group, the spec of its activation, None where it stays float, and the sites of its weights."""
    paired = frozenset(site.site for site in plan.sites if isinstance(site.site, TensorId))
    written = frozenset(site.site for site in plan.sites if site.role is Role.OUTPUT)
    by_edge = {(site.role, edge): site for site in plan.sites for edge in site.find_readers(index)}
    for group in find_groups(index):
        # A Mul behind a pair, or behind integers that are merely moved, would be a float kernel between two that are
        # not.
        _, *sources = index.walk_back(group.tensor, _MOVING)
        if group.home is None and (group.tensor in written or not paired.isdisjoint(sources)):
            continue
        edges = [op.node.make_edge(0) for op in group.readers]
        inputs = [
            by_edge.get((Role.ACTIVATION, edge)) or by_edge.get((Role.OUTPUT, edge))
            for edge in edges
        ]
        specs = {None if site is None else site.spec for site in inputs}
        spec = next(iter(specs))
        if len(specs) > 1 or (spec is not None and (spec.is_float or not spec.has_one_scale)):
            continue
        weights = [by_edge.get((Role.WEIGHT, op.node.make_edge(1))) for op in group.readers]
        sites = [site for site in weights if site is not None and not site.spec.is_float]
        # One scale meets all channels of the activation; blocks of a weight have scales of their own already.
        blocked = any(site.spec.has_blocks for site in sites)
        if len(sites) == len(weights) and not (blocked and spec is not None):
            yield group, spec, tuple(sites)


def compute_smoothing_factors(
    proto: ModelLike, plan: Plan, statistics: Mapping[TensorId, ChannelStatistics]
) -> tuple[Factors, Names]:
    """s by tensor for those of the plan's groups whose outputs gain by it, and the choices and reasons of all.

    plan: without numbers; it says which tensors are quantized and how. statistics: of each group's tensor.
    """
    searches = [
        (statistics[group.tensor], group, spec, sites)
        for group, spec, sites in _find_specs(get_index(proto), plan)
        if group.tensor in statistics
    ]
    factors = {}
    lines = []
    choices = map_in_threads(lambda search: _smooth_group(*search), searches)
    for (_, group, _, _), (line, s) in zip(searches, choices, strict=True):
        lines.append(line)
        if s is not None:
            factors[group.tensor] = s
        release_pages(*(op.weight for op in group.readers))
    return factors, tuple(lines)


def _smooth_group(
    values: ChannelStatistics, group: SmoothingGroup, spec: QuantSpec | None, sites: SitePlans
) -> tuple[str, Floats | None]:
    """The choice for one group with its reason, and s where the outputs gain by it."""
    # Weights are turned to [inputs, outputs], and the order of their sums with them.
    weights = [
        SmoothedWeight(
            op.weight if op.axis == 1 else op.weight.T,
            turn_spec(site.spec),
            ((1, 0),) if site.sum_orders else (),
        )
        for op, site in zip(group.readers, sites, strict=True)
    ]
    if spec is None:
        s, alpha, error, plain = search_awq_exponent(values.rows, weights)
    else:
        s, alpha, error, plain = search_smoothing_exponent(values, weights, spec)
    gain = 10.0 * np.log10(max(plain, 1e-30) / max(error, 1e-30))
    home = group.home.node if isinstance(group.home, Linear) else group.home
    pays = error < plain * MUL
    how = "one Mul"
    if home is not None:
        pays = error < plain * FREE
        how = f"in {home.name}"
    verdict = f"smoothed, {how}" if pays else f"left, {how} does not pay"
    line = f"{group.tensor.name}: {verdict} (alpha {alpha}: {gain:+.1f} dB at the layer)"
    return line, s if pays else None


# Integers pass through these.
_MOVING = LAYOUT_OPS | {"MaxPool"}


def write_smoothing(proto: ModelLike, factors: Factors) -> ModelLike:
    """The model with these tensors divided by their factors on the way to the layers, whose weights are multiplied.

    Raises PlanError for a tensor that no layer reads so, or with another number of channels.
    """
    if not factors:
        return proto
    groups = {group.tensor: group for group in find_groups(get_index(proto))}
    for tensor, s in factors.items():
        if tensor not in groups or groups[tensor].channels != s.size:
            cause = "feeds no layers that could be smoothed this way"
            raise PlanError(tensor, cause, "plan the model again", code="Q404")
    # A linear operator in front of one group may itself be a layer of another: both factors meet in its weight.
    # Factors, not products: weights are multiplied one after another, so that one of them is in memory.
    weights: _Turns = {}
    edit = Edit(proto)
    for tensor, s in factors.items():
        group = groups[tensor]
        wide = as_float64(s)
        if group.home is None:
            _insert_division(edit, group, wide)
        else:
            _divide_in_home(edit, group.home, wide, weights)
        for op in group.readers:
            laid = wide[:, None] if op.axis == 1 else wide[None]
            weights.setdefault(op.node.name, (op, []))[1].append(laid)
    for op, turns in weights.values():
        value = op.weight.astype(np.float64)
        for turned in turns:
            value *= turned
        edit.set_rounded(op.node.make_edge(1), value, op.weight.dtype)
        release_pages(op.weight)
    return edit.export()


def _insert_division(edit: Edit, group: SmoothingGroup, s: Array64) -> None:
    """X/s in a Mul in front of the layers."""
    first = group.readers[0].node
    inverse = edit.add_constant(first.scope, f"{group.tensor.name}/smoothing", as_float32(1.0 / s))
    smoothed = edit.insert_before(
        first, "Mul", (group.tensor.name, inverse), f"{group.tensor.name}/smoothed"
    )
    for op in group.readers:
        edit.read(op.node.make_edge(0), smoothed)


def _divide_in_home(edit: Edit, home: NodeRef | Linear, s: Array64, weights: _Turns) -> None:
    """X/s in the node that writes X. weights: gets the factors of a linear operator's."""
    if isinstance(home, Linear):
        # Columns of [K, N], or rows of [N, K].
        turned = 1.0 / (s[None] if home.axis == 1 else s[:, None])
        weights.setdefault(home.node.name, (home, []))[1].append(turned)
        edges = [home.bias_edge] if home.bias_edge is not None else []
    else:
        # Scale and bias of a normalization.
        edges = [home.make_edge(1), home.make_edge(2)]
    for edge in edges:
        value = read_constant(edit.index, edge)
        if value is not None:
            edit.set_constant(edge, (as_float64(value) / s).astype(value.dtype))
