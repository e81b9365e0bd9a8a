"""One operator's weight as a matrix: where it lies, how windows of its input become rows, where its bias is.

Positions are gathered by index, without a padded copy, a window view or a transposition, and the same index serves all
tensors of a shape. Means over every position need no unfolding: the sum of a tap's inputs over all positions is a sum
over the elements that the tap reads, so one product per axis with a matrix of counts gives all taps.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from onnxq.arrays import (
    Array,
    Array64,
    Axes,
    Floats,
    Integers,
    Mask,
    Shape,
    as_float32,
    as_float64,
    as_int64,
)
from onnxq.graph import GraphIndex, NodeRef
from onnxq.passes.linear import find_linear
from onnxq.passes.rewrites.single_nodes import find_pooled_axes
from onnxq.plan import Plan, SitePlan
from onnxq.planner.sums import read_constant
from onnxq.sites import Edge, TensorId

# A number for each axis of a kernel, or two for both its ends.
PerAxis = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """How an operator's input becomes columns of its matrix form.

    kernel: () for Gemm and MatMul, whose last axis holds the columns. pads: begins, then ends, as in ONNX;
    auto_pad overrides them. upsample: for a transposed convolution, the distance of its input values after zeros are
    inserted; it is then a convolution of stride 1 with the flipped kernel, whose pads may be negative (cropping).
    """

    groups: int = 1
    kernel: Shape = ()
    strides: PerAxis = ()
    dilations: PerAxis = ()
    pads: PerAxis = ()
    auto_pad: str = "NOTSET"
    upsample: PerAxis = ()


def gather_columns(tensors: Iterable[Array], geometry: Geometry, chosen: Integers) -> list[Floats]:
    """Columns of tensors of one shape at some positions: [groups, K, n], K in the order of the flattened weight.

    Positions are counted over output pixels, samples one after the other.
    """
    values = [as_float32(tensor) for tensor in tensors]
    shape = values[0].shape
    if not geometry.kernel:
        # One group, K along the last axis of the input.
        return [value.reshape(-1, shape[-1])[chosen].T[None] for value in values]
    # Each position reads one window.
    reads = _list_reads(shape[2:], geometry)
    outputs = (read.shape[1] for read in reads)
    batch, *at = np.unravel_index(chosen, (shape[0], *outputs))
    rank = len(at)
    # Axes [kH, kW, n] are added up by broadcasting: no index of all windows exists before the end.
    index = as_int64(batch).reshape((1,) * rank + (-1,)) * math.prod(shape[2:])
    inside = np.ones((1,) * (rank + 1), bool)
    for axis, read in enumerate(reads):
        aligned = [1] * rank + [len(chosen)]
        aligned[axis] = len(read)
        element = read[:, at[axis]].reshape(aligned)
        index = index + np.maximum(element, 0) * math.prod(shape[3 + axis :])
        inside = inside & (element >= 0)
    outside = np.flatnonzero(~np.broadcast_to(inside, (*geometry.kernel, len(chosen))))
    gathered = []
    for value in values:
        # [N, C, H, W] to [C, N·H·W]: one index serves all channels and all tensors.
        flat = np.moveaxis(value, 0, 1).reshape(shape[1], -1)
        columns = flat.take(index.ravel(), axis=1)
        # Indices in padding point somewhere into the input.
        if outside.size:
            columns[:, outside] = 0
        size = shape[1] // geometry.groups * math.prod(geometry.kernel)
        gathered.append(columns.reshape(geometry.groups, size, len(chosen)))
    return gathered


# OpenBLAS may leave a flag of lanes that it fills up and does not use.
@np.errstate(invalid="ignore")
def window_means(x: Array, geometry: Geometry, chosen: Mask | None = None) -> Array64:
    """Means of the columns over all positions, for each entry of the first axis: [entries, groups, K].

    chosen: bool [entries, positions], the positions that count, only without a kernel; None: all.
    """
    values = as_float32(x)
    entries = len(values)
    if not geometry.kernel:
        rows = values.reshape(entries, -1, values.shape[-1])
        counted = np.ones(rows.shape[:2], np.float32) if chosen is None else as_float32(chosen)
        # A sample that is all padding has no position: its mean is 0, not NaN.
        total = np.maximum(counted.sum(axis=1, dtype=np.float64), 1)
        # [entries, 1, positions] @ [entries, positions, K].
        return as_float64((counted[:, None] @ rows) / total[:, None, None])
    # Padding counts as zeros that were read, as the convolution itself sees it.
    total = np.maximum(gather_positions(values.shape, geometry) / max(entries, 1), 1)
    spatial = values.shape[2:]
    counts = _count_reads(spatial, geometry)
    # 1 x 1 without stride or padding, as most are: one product with a vector.
    if all(taps.shape[1] == 1 and taps.all() for taps in counts):
        places = math.prod(spatial)
        sums = values.reshape(-1, places) @ np.ones(places, np.float32)
    else:
        # One axis after the other, the last first: [the rest, places, taps of the later axes] -> [the rest, all taps].
        sums = values.reshape(-1, spatial[-1]) @ counts[-1]
        for size, taps in reversed(list(zip(spatial[:-1], counts[:-1], strict=True))):
            sums = (taps.T @ sums.reshape(-1, size, sums.shape[-1])).reshape(
                -1, taps.shape[1] * sums.shape[-1]
            )
    return as_float64(sums.reshape(entries, geometry.groups, -1) / total)


def gather_positions(shape: Shape, geometry: Geometry) -> int:
    """Number of columns of an input of this shape: output pixels, or the product of all axes but the last."""
    if not geometry.kernel:
        return math.prod(shape[:-1])
    return shape[0] * math.prod(len(read[0]) for read in _list_reads(shape[2:], geometry))


def sample_positions(total: int, limit: int, seed: int) -> Integers:
    """At most `limit` of `total` positions, ascending, the same for the same seed."""
    if total <= limit:
        return np.arange(total)
    # Ascending indices are read from memory in its order.
    return np.sort(
        np.random.default_rng((seed, total, limit)).choice(
            total, size=limit, replace=False, shuffle=False
        )
    )


# All samples of one operator have one shape or few, and the next operator others.
@lru_cache(maxsize=4)
def _list_reads(spatial: Shape, geometry: Geometry) -> tuple[Integers, ...]:
    """For each axis the element that each tap reads for each output, [taps, outputs]; -1 outside of the input."""
    reads = []
    for axis, (size, (before, after)) in enumerate(
        zip(spatial, _find_padding(spatial, geometry), strict=True)
    ):
        stride = geometry.strides[axis]
        step = geometry.upsample[axis] if geometry.upsample else 1
        # With step - 1 zeros between each two values, which count as padding, and none behind the last.
        spread = (size - 1) * step + 1
        taps = np.arange(geometry.kernel[axis])[:, None] * geometry.dilations[axis]
        outputs = max((spread + before + after - int(taps[-1, 0]) - 1) // stride + 1, 0)
        read = taps + np.arange(outputs) * stride - before
        there = (read >= 0) & (read < spread) & (read % step == 0)
        reads.append(np.where(there, read // step, -1))
    return tuple(reads)


@lru_cache(maxsize=4)
def _count_reads(spatial: Shape, geometry: Geometry) -> tuple[Floats, ...]:
    """For each axis the number of outputs that read each element by each tap: [elements, taps]."""
    every = []
    for size, read in zip(spatial, _list_reads(spatial, geometry), strict=True):
        counts = np.zeros((size, len(read)), np.float32)
        tap, output = np.nonzero(read >= 0)
        counts[read[tap, output], tap] = 1
        every.append(counts)
    return tuple(every)


def _find_padding(spatial: Shape, geometry: Geometry) -> list[tuple[int, int]]:
    """(before, after): padding of each spatial axis."""
    rank = len(geometry.kernel)
    if geometry.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # As in ONNX: ceil(n / s) outputs, and the odd pad at the end (SAME_UPPER) or in front.
        sizes = (spatial, geometry.kernel, geometry.dilations, geometry.strides)
        totals = [
            max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            for n, k, d, s in zip(*sizes, strict=True)
        ]
        odd_in_front = geometry.auto_pad == "SAME_LOWER"
        befores = [(total + odd_in_front) // 2 for total in totals]
        return [(before, total - before) for before, total in zip(befores, totals, strict=True)]
    return [(geometry.pads[k], geometry.pads[k + rank]) for k in range(rank)]


# Positions are only alike to what the operator reads, so correlations count for half.
POOLED_DAMPING = 1.0
# What the tensor in front of the pooling is to a 1 x 1 convolution.
POINTWISE = Geometry(kernel=(1, 1), strides=(1, 1), dilations=(1, 1), pads=(0, 0, 0, 0))
_MOVING = frozenset({"Flatten", "Reshape", "Squeeze", "Identity"})


@dataclass(frozen=True, eq=False)
class Operator:
    """A node with a quantized constant weight.

    weight: as stored. geometry: of its input. bias: its values [outputs] (zeros where it has none), bias_edge: the
    input that reads it or may, None where it cannot be changed; bias_shape: as stored. alone: nothing else reads the
    weight. kind: its name in reports' counts.
    """

    node: NodeRef
    data: TensorId
    site: SitePlan
    weight: Array
    geometry: Geometry
    bias: Array
    bias_edge: Edge | None
    bias_shape: Shape
    bias_site: SitePlan | None
    alone: bool
    kind: str

    @property
    def _kernel_axes(self) -> Axes:
        """Of a weight whose first axis is split by group."""
        return tuple(range(3, self.weight.ndim + 1))

    @property
    def output_axis(self) -> int | None:
        """The weight's axis that rows of the matrix form lie along; None where groups share it."""
        if self.node.op_type == "ConvTranspose":
            # W is [C, M / groups, kH, kW]: rows of several groups share an entry of axis 1.
            return 1 if self.geometry.groups == 1 else None
        return 0 if self.node.op_type == "Conv" or self.node.is_transposed else 1

    def to_rows(self, array: Array) -> Array:
        """An array of the weight's shape as [groups, rows, K]."""
        groups = self.geometry.groups
        if self.node.op_type == "Conv":
            return array.reshape(groups, len(array) // groups, -1)
        if self.node.op_type == "ConvTranspose":
            parted = array.reshape(groups, len(array) // groups, *array.shape[1:])
            # As a convolution over the upsampled input, whose kernel is the flipped one.
            return (
                np.flip(parted, self._kernel_axes)
                .swapaxes(1, 2)
                .reshape(groups, array.shape[1], -1)
            )
        return (array if self.node.is_transposed else array.T)[None]

    def to_stored(self, rows: Array) -> Array:
        """The inverse of `to_rows`."""
        if self.node.op_type == "Conv":
            return np.ascontiguousarray(rows.reshape(self.weight.shape))
        if self.node.op_type == "ConvTranspose":
            groups = self.geometry.groups
            inputs, outputs, *kernel = self.weight.shape
            parted = rows.reshape(groups, outputs, inputs // groups, *kernel).swapaxes(1, 2)
            return np.ascontiguousarray(
                np.flip(parted, self._kernel_axes).reshape(self.weight.shape)
            )
        return np.ascontiguousarray(rows[0] if self.node.is_transposed else rows[0].T)


def list_operators(index: GraphIndex, plan: Plan) -> list[Operator]:
    """The operators that can be rounded sequentially, in the order the model runs.

    Without those whose weight a body of a loop multiplies by too, many times: the file holds its numbers for both.
    """
    looped = {site.quantized_tensor for site in plan.sites if index.is_looped(site.site.scope)}
    biases = {
        edge: site for site in plan.sites if site.role.is_bias for edge in site.named_consumers
    }
    # An operand in a few levels of its own, of which a correction would be lost.
    fixed = {
        edge for site in plan.sites if not site.role.is_constant for edge in site.named_consumers
    }
    operators = []
    for site in plan.sites:
        if not site.role.is_weight or site.qparams is None:
            continue
        if site.quantized_tensor in looped and not index.is_looped(site.site.scope):
            continue
        # Which of several readers may move a weight is decided later.
        edges = site.named_consumers
        for edge in edges:
            operator = _describe_operator(index, site, edge, biases, fixed, alone=len(edges) == 1)
            if operator is not None:
                operators.append(operator)
    return sorted(operators, key=lambda operator: operator.node.order)


def _describe_operator(
    index: GraphIndex,
    site: SitePlan,
    edge: Edge,
    biases: Mapping[Edge, SitePlan],
    fixed: Collection[Edge],
    *,
    alone: bool,
) -> Operator | None:
    node = index.find_node(edge.node)
    data = index.find_input(node)
    weight = index.input_value(node, edge.index)
    # A weight on the left, or of an operator of another domain, has no matrix form here.
    if edge.index != 1 or node.domain or data is None or index.is_constant(data) or weight is None:
        return None
    geometry = _describe_geometry(node, weight)
    # Models in float16 or bfloat16 are planned in float32; float64 has no integer kernels.
    if geometry is None or not weight.size or weight.dtype != np.float32:
        return None
    rows_first = node.op_type == "Conv" or node.is_transposed
    outputs = len(weight) if rows_first else weight.shape[1] * geometry.groups
    bias_edge = None
    bias = np.zeros(())
    linear = find_linear(index, node)
    # One that is computed, scaled, or differs by row, takes no correction.
    if linear is not None and linear.has_plain_bias:
        bias = linear.bias
        # Behind a MatMul a single number cannot take one for each output.
        single = node.op_type == "MatMul" and bias.size != outputs
        bias_edge = None if single or linear.bias_edge in fixed else linear.bias_edge
    stored = read_constant(index, bias_edge)
    # One input channel a group: W is [C, 1, kH, kW].
    depthwise = geometry.groups > 1 and weight.shape[1] == 1
    return Operator(
        node,
        data,
        site,
        weight,
        geometry,
        np.array(np.broadcast_to(bias, outputs)),
        bias_edge,
        stored.shape if stored is not None and stored.size == outputs else (outputs,),
        biases.get(bias_edge) if bias_edge is not None else None,
        alone,
        "depthwise Conv" if depthwise else node.op_type,
    )


def _describe_geometry(node: NodeRef, weight: Array) -> Geometry | None:
    attrs = node.attrs
    if node.op_type == "MatMul":
        return Geometry() if weight.ndim == 2 else None
    if node.op_type == "Gemm":
        # alpha would be a second scale of the weight, and transA puts K on the other axis.
        plain = not node.transposes_data and node.read_float("alpha", 1.0) == 1.0
        return Geometry() if plain and weight.ndim == 2 else None
    if node.op_type not in ("Conv", "ConvTranspose") or weight.ndim < 3:
        return None
    rank = weight.ndim - 2
    ones = (1,) * rank
    none = (0,) * (2 * rank)
    geometry = Geometry(
        groups=node.groups,
        kernel=weight.shape[2:],
        strides=attrs.get("strides", ones),
        dilations=attrs.get("dilations", ones),
        pads=none if node.padding_mode == "VALID" else attrs.get("pads", none),
        auto_pad=node.padding_mode,
    )
    return geometry if node.op_type == "Conv" else _turn_transposed(node, geometry)


def _turn_transposed(node: NodeRef, geometry: Geometry) -> Geometry | None:
    """As a convolution over the input with zeros between its values; None where padding depends on the input's size."""
    # ONNX computes the pads from `output_shape`, or for SAME_* from the size of the input.
    if geometry.auto_pad not in ("NOTSET", "VALID") or "output_shape" in node.attrs:
        return None
    ones = (1,) * len(geometry.kernel)
    # Without padding every input reaches a whole kernel of outputs; what is padded there is cropped here.
    reach = np.subtract(geometry.kernel, 1) * geometry.dilations
    ends = reach + node.attrs.get("output_padding", 0)
    return replace(
        geometry,
        strides=ones,
        pads=tuple(np.subtract([*reach, *ends], geometry.pads).tolist()),
        auto_pad="NOTSET",
        upsample=geometry.strides,
    )


def find_pooling(index: GraphIndex, operator: Operator) -> tuple[NodeRef, TensorId] | None:
    """The node that pools [N, C, H, W] to the one position a sample that a Gemm, MatMul or 1 x 1 Conv reads, and what
    it pools.

    A Gemm behind a GlobalAveragePool sees one position a sample: 28 for 1280 columns. The pooled values vary in the
    directions that the positions do, of which there are as many times more as the picture has. With weights of 4 bits
    EfficientNet-Lite0's classifier alone loses .5 dB less on scenes not seen, .9 with other views of the samples. Means
    are the same on both sides of the pooling; re-fits are not, as it takes the mean of the noise too, so there is none.
    """
    plain = operator.geometry.groups == 1 and set(operator.geometry.kernel) <= {1}
    # Exporters flatten [N, C, 1, 1] to [N, C] between pool and classifier.
    pooled = index.find_origin(operator.data, _MOVING)
    node = index.find_onnx_producer(pooled) if plain else None
    if node is None or node.scope:
        return None
    tensor = (
        index.find_input(node)
        if node.op_type == "GlobalAveragePool"
        else find_pooled_axes(index, node)
    )
    shape = index.find_shape(tensor)
    whole = (
        shape is not None
        and len(shape) == 4
        # A Flatten of more than one position makes wider columns than the pool has channels.
        and shape[1] == operator.to_rows(operator.weight).shape[2]
    )
    return (node, tensor) if tensor is not None and whole else None
