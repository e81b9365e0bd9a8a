"""SmoothQuant in the graph: X/s before the linear layers that read X, s·W in them.

X is divided where that costs nothing, in the scale and bias of a LayerNormalization or in the weights of a linear
operator in front, if all that reads X is smoothed; else by one Mul on the branch that feeds the layers, where the
error of their outputs falls enough to pay for it. (A Gelu cannot take the factors in: unfolded, with a vector in place
of its constants, ORT runs it as five nodes instead of one.) Where only weights are quantized, s is AWQ's.

X·W = (X/s)·(s·W). SmoothQuant, Xiao et al. 2022 (https://arxiv.org/abs/2211.10438), equation 4, where activations are
quantized: s_c = max|X_c| ** alpha / max_j |W_cj| ** (1 - alpha). Channels without values or without weights keep 1.
Powers of two for s lose nearly two decibels, so they are not used. AWQ, Lin et al. 2023
(https://arxiv.org/abs/2306.00978), where only weights are, so that rounding errors of s·W are divided by s:
s_c = mean|X_c| ** alpha. Channels without values get the smallest s. Both are divided by their geometric mean, and
alpha is chosen by the error of the layers' outputs, with all rounded that the plan rounds.

AWQ for MiniLM, int4 in blocks of 32, every group scaled: nearest rounding 13.2 -> 15.1 dB, GPTQ 17.6 -> 17.8 dB: it
reaches most of the gain of scaling by itself. So a Mul is inserted only where the layer's error falls by 4 dB, as for
SmoothQuant.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.arrays import Array, Array64, Floats, are_finite, as_float32, as_float64, list_other_axes
from onnxq.evaluation.accumulator import relative_noise, sum_squares
from onnxq.graph import LAYOUT_OPS, GraphIndex, ModelLike, NodeRef, get_index, release_pages
from onnxq.numerics import SumOrders, fake_quant, fake_quant_weight, weight_qparams
from onnxq.numerics.machine import map_in_threads
from onnxq.numerics.ranges import qparams_from_range
from onnxq.passes.linear import Linear, find_linear
from onnxq.passes.patterns import Edit, unfit_plan
from onnxq.plan import Plan, SitePlans
from onnxq.planner.sums import read_constant
from onnxq.sites import Names, Role, TensorId
from onnxq.spec import PerTensor, QuantSpec

# SmoothQuant's own strength is .5: MiniLM, weights and activations of 8 bits, has 17.4 dB with it,
# 23.7 with .65 and 24.7 with .8.
SMOOTHING_ALPHAS = (0.5, 0.65, 0.8, 0.9)
AWQ_ALPHAS = (0.15, 0.25, 0.35, 0.5, 0.65)
# Share of the largest channel below which a channel counts as empty, of its largest value and of its mean magnitude.
_DEAD_PEAK = 1e-6
_DEAD_MEAN = 1e-4
# (s [channels], alpha, error with them, error without scaling); errors are noise over signal.
Choice = tuple[Floats, float, float, float]


@dataclass(frozen=True, eq=False)
class SmoothedWeight:
    """A weight [inputs, outputs] with its spec transposed likewise: channels along axis 1, blocks along axis 0.

    orders: the 16-bit sums that its integers must keep.
    """

    weight: Floats
    spec: QuantSpec
    orders: SumOrders = ()

    def round_scaled(self, s: Floats) -> Floats:
        """The weight times s [inputs], quantized and dequantized."""
        # Rows are inputs here, so a factor a channel goes along axis 0.
        weight = self.weight * s[:, None]
        qparams = weight_qparams(weight, self.spec, orders=self.orders)
        return as_float32(fake_quant_weight(weight, qparams, self.spec, self.orders))


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Statistics of an activation: low, high [channels] over all samples, and some of its rows [n, channels]."""

    low: Array64
    high: Array64
    rows: Floats

    @property
    def largest(self) -> Array64:
        """max |X_c|, [channels]."""
        return np.maximum(abs(self.low), abs(self.high))


class RunningStatistics:
    """Statistics of an activation so far: `extend_range` and `keep_rows` sample by sample, then `finish`."""

    def __init__(self, channels: int, rows: int) -> None:
        self.low = np.full(channels, np.inf)
        self.high = np.full(channels, -np.inf)
        self.rows: list[Floats] = []
        self.left = rows

    def extend_range(self, value: Array, axis: int) -> None:
        """value: channels along `axis`."""
        others = list_other_axes(value, axis % value.ndim)
        self.low = np.minimum(self.low, value.min(axis=others))
        self.high = np.maximum(self.high, value.max(axis=others))

    def keep_rows(self, values: Array, share: int) -> None:
        """Keep up to `share` rows, evenly spread, of values [positions, channels] without padding."""
        take = min(share, self.left, len(values))
        if take:
            picked = np.linspace(0, len(values) - 1, take).astype(int)
            self.rows.append(as_float32(values[picked]))
            self.left -= take

    def finish(self) -> ChannelStatistics | None:
        """The statistics; None where values were NaN or inf."""
        # Also where no sample reached it: the ends are still infinite.
        if not (are_finite(self.low) and are_finite(self.high)):
            return None
        rows = np.concatenate(self.rows) if self.rows else np.zeros((0, self.low.size), np.float32)
        return ChannelStatistics(self.low, self.high, rows)


def compute_smoothing(largest: Array64, weights: Sequence[Array], alpha: float) -> Floats:
    """SmoothQuant's s, [channels]. largest: max |X_c|; weights: [channels, outputs] each."""
    # All layers that read the activation share s, so the largest weight of any of them counts.
    columns = as_float64(np.max([abs(w).max(axis=1) for w in weights], axis=0))
    alive = (largest > _DEAD_PEAK * largest.max(initial=0.0)) & (
        columns > _DEAD_PEAK * columns.max(initial=0.0)
    )
    logs = alpha * np.log(largest[alive]) - (1.0 - alpha) * np.log(columns[alive])
    s = np.ones_like(largest)
    # In logarithms the geometric mean is a mean, and no power overflows. Divided by it, s neither
    # grows the weights nor the activations as a whole.
    s[alive] = np.exp(logs - logs.mean()) if logs.size else 1.0
    return as_float32(s)


def compute_awq_scaling(rows: Floats, alpha: float) -> Floats:
    """AWQ's s, [channels]; rows: [n, channels] of the activation."""
    size = abs(rows).mean(axis=0, dtype=np.float64)
    if not size.max(initial=0.0) > 0:
        return np.ones(size.size, np.float32)
    # The floor keeps silent channels from a factor near 0, whose inverse would blow up their rows.
    logs = alpha * np.log(np.maximum(size, _DEAD_MEAN * size.max()))
    return as_float32(np.exp(logs - logs.mean()))


def measure_layer_error(
    statistics: ChannelStatistics,
    weights: Sequence[SmoothedWeight],
    spec: QuantSpec,
    s: Floats,
    exact: Sequence[Array],
) -> float:
    """Mean noise-to-signal ratio of the layers' outputs, with activations (by `spec`) and weights quantized.

    exact: the float outputs.
    """
    # A range always holds zero, which quantizers keep exact.
    low = min(float((statistics.low / s).min()), 0.0)
    high = max(float((statistics.high / s).max()), 0.0)
    x = as_float32(fake_quant(statistics.rows / s, qparams_from_range(low, high, spec), spec))
    ratios = [
        relative_noise([sum_squares(x @ layer.round_scaled(s), output)], sum_squares(output))
        for layer, output in zip(weights, exact, strict=True)
    ]
    return float(np.mean(ratios))


def measure_weights_error(rows: Floats, weights: Sequence[SmoothedWeight], s: Floats) -> float:
    """Mean noise-to-signal ratio of the layers' outputs, with only the weights quantized."""
    ratios = []
    for layer in weights:
        # Activations divided by s stay float, so the error is that of the weights alone.
        gap = layer.round_scaled(s) / s[:, None] - layer.weight
        # Dead layers, whose outputs are all 0, have no signal to divide by.
        ratios.append(sum_squares(rows @ gap) / max(sum_squares(rows @ layer.weight), 1e-30))
    return float(np.mean(ratios))


def search_smoothing_exponent(
    statistics: ChannelStatistics, weights: Sequence[SmoothedWeight], spec: QuantSpec
) -> Choice:
    """The best of SMOOTHING_ALPHAS for an activation, quantized by `spec`, and the layers that read it."""
    largest = statistics.largest
    arrays = [layer.weight for layer in weights]
    exact = [statistics.rows @ weight for weight in arrays]
    return _choose_exponent(
        {alpha: compute_smoothing(largest, arrays, alpha) for alpha in SMOOTHING_ALPHAS},
        lambda s: measure_layer_error(statistics, weights, spec, s, exact),
    )


def search_awq_exponent(rows: Floats, weights: Sequence[SmoothedWeight]) -> Choice:
    """The best of AWQ_ALPHAS for some rows [n, channels] of the activation."""
    return _choose_exponent(
        {alpha: compute_awq_scaling(rows, alpha) for alpha in AWQ_ALPHAS},
        lambda s: measure_weights_error(rows, weights, s),
    )


def _choose_exponent(factors: dict[float, Floats], measure: Callable[[Floats], float]) -> Choice:
    """The exponent whose factors leave the least error; of equal ones the first."""
    # Plain rounding is no candidate but the mark that callers compare the gain with.
    plain = measure(np.ones_like(next(iter(factors.values()))))
    errors = {alpha: measure(s) for alpha, s in factors.items()}
    # `min` keeps the first of equals, the mildest exponent.
    best = min(errors, key=errors.__getitem__)
    return factors[best], best, errors[best], plain


def turn_spec(spec: QuantSpec) -> QuantSpec:
    """The spec of a weight transposed so that its outputs lie along axis 1 and its blocks along axis 0."""
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return spec
    return replace(spec, granularity=replace(grain, axis=1 if spec.has_channels else 0))


Factors = Mapping[TensorId, Floats]
# What the weight of an operator is multiplied by.
_Turns = dict[Linear, list[Array64]]
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
        x = index.find_input(node)
        owned = index.is_owned(index.find_input(node, 1))
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
        rank = index.find_rank(norm.result) or 0
        last = norm.read_int("axis", -1) in (-1, rank - 1)
        _, *constants = index.list_reads(norm)
        own = all(index.is_constant(value) and index.is_owned(value) for value in constants)
        return norm if norm.result == tensor and own and last else None
    if tensor in makers:
        return makers[tensor]
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
    # Where the pair of an output and one of its own are at an input, its own counts.
    ordered = sorted(plan.sites, key=lambda site: site.role is not Role.OUTPUT)
    by_edge = {edge: site for site in ordered for edge in site.find_readers(index)}
    for group in find_groups(index):
        # A Mul behind a pair, or behind integers that are merely moved, would be a float kernel between two that are
        # not.
        _, *sources = index.walk_back(group.tensor, _MOVING)
        if group.home is None and (group.tensor in written or not paired.isdisjoint(sources)):
            continue
        read = [by_edge.get(op.node.make_edge(0)) for op in group.readers]
        specs = {None if site is None else site.spec for site in read}
        spec = next(iter(specs))
        if len(specs) > 1 or (spec is not None and (spec.is_float or not spec.has_one_scale)):
            continue
        multiplied = [by_edge.get(op.node.make_edge(1)) for op in group.readers]
        sites = [site for site in multiplied if site is not None and not site.spec.is_float]
        # One scale meets all channels of the activation; blocks of a weight have scales of their own already.
        blocked = any(site.spec.has_blocks for site in sites)
        if len(sites) == len(multiplied) and not (blocked and spec is not None):
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
    most, how = (MUL, "one Mul") if home is None else (FREE, f"in {home.name}")
    pays = error < plain * most
    verdict = f"smoothed, {how}" if pays else f"left, {how} does not pay"
    line = f"{group.tensor.name}: {verdict} (alpha {alpha}: {gain:+.1f} dB at the layer)"
    return line, s if pays else None


# Integers pass through these.
_MOVING = LAYOUT_OPS | {"MaxPool"}


def write_smoothing(proto: ModelLike, factors: Factors) -> ModelLike:
    """The model with these tensors divided by their factors on the way to the layers, whose weights are multiplied.

    Raises PlanError for a tensor that no layer reads so, or with another number of channels.
    """
    groups = {group.tensor: group for group in find_groups(get_index(proto))}
    for tensor, s in factors.items():
        if tensor not in groups or groups[tensor].channels != s.size:
            cause = "feeds no layers that could be smoothed this way"
            raise unfit_plan(tensor, cause)
    # A linear operator in front of one group may itself be a layer of another: both factors meet in its weight.
    # Factors, not products: weights are multiplied one after another, so that one of them is in memory.
    weights: _Turns = defaultdict(list)
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
            weights[op].append(laid)
    for op, turns in weights.items():
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
        weights[home].append(turned)
        edges = [home.bias_edge] if home.bias_edge is not None else []
    else:
        # Scale and bias of a normalization.
        edges = [home.make_edge(1), home.make_edge(2)]
    for edge in edges:
        value = read_constant(edit.index, edge)
        if value is not None:
            edit.set_constant(edge, (as_float64(value) / s).astype(value.dtype))
