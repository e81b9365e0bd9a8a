"""Searches of the graph around a node, for placement rules: residual blocks, attention, front ends of logarithms.

And what rules of several engines ask of a node alike.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from onnxq.backends.base import REMEDY, Candidate, Exclusion, PlacementRule, Reason
from onnxq.graph import LAYOUT_OPS, Graph, MaybeNode, NodeRef
from onnxq.graph.base import counts_in_floats
from onnxq.sites import MaybeTensor, NameSet, TensorId

# Widths that a byte stores.
BYTE_WIDTHS = (2, 3, 4, 5, 6, 7, 8)
# Attention of a network with caches, as one node.
ATTENTION = ("Attention", "com.microsoft.MultiHeadAttention", "com.microsoft.GroupQueryAttention")
_FUSED = f"its weight lies in an operator of ONNX Runtime's own: {REMEDY}"
# Operators that ONNX Runtime's optimizer makes of products with constant weights.
FUSED_PRODUCTS: Mapping[str, str] = {
    f"com.microsoft.{name}": _FUSED
    for name in (
        "Attention",
        "DecoderAttention",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "GemmFastGelu",
        "MoE",
        # In blocks of the channels that a vector of the CPU holds.
        "nchwc.Conv",
    )
}
_LAYOUTS = ("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice")
# Operators that move values as they are, whatever their type.
MOVES = (*_LAYOUTS, "DepthToSpace", "SpaceToDepth")
# Nodes between a convolution and the end of its branch: they copy or move its result, compute it pointwise, or combine
# it with a constant.
_COPIES = frozenset((*_LAYOUTS, "Identity", "Cast", "Dropout", "Pad"))
_POINTWISE = frozenset(
    (
        "Relu",
        "Clip",
        "LeakyRelu",
        "PRelu",
        "HardSwish",
        "HardSigmoid",
        "Elu",
        "Gelu",
        "Mish",
        "Sigmoid",
        "Tanh",
        "BatchNormalization",
        "MaxPool",
    )
)
_WITH_CONSTANT = frozenset(("Add", "Sub", "Mul", "Div"))
_CONVOLUTIONS = ("Conv", "ConvTranspose")
# Nodes between the scores of attention and its softmax: scaling and masking.
_SCORING = frozenset(
    ("Add", "Mul", "Div", "Sub", "Where", "Cast", "Identity", "Reshape", "Flatten", "Max", "Clip")
)
# A Where replaces the NaN of rows that are masked as a whole, as torch's exporters write it.
_AFTER_SOFTMAX = frozenset(("Cast", "Identity", "Dropout", "Where", "Reshape", "Flatten"))
_MOVES = LAYOUT_OPS | {"Cast"}
# Nodes that cut one result into query, key and value.
_CUTS = frozenset(("Slice", "Split", "Gather"))
# Nodes that a search passes at most.
_REACH = 24


def list_computed_inputs(index: Graph, node: NodeRef) -> list[TensorId]:
    """The computed tensors a node reads, in order."""
    return list(index.list_computed(node).values())


def find_backbone(index: Graph, tensor: MaybeTensor) -> str | None:
    """Name of the convolution whose activated and moved result the tensor is; None for any other tensor.

    x * sigmoid(x) counts as an activation; a sum or product of two different branches ends the search.
    """
    for _ in range(_REACH):
        node = index.find_producer(tensor)
        if node is None:
            return None
        if node.op_type in _CONVOLUTIONS:
            return node.name
        sources = list_computed_inputs(index, node)
        # x · gate(x), as exporters write Swish and HardSwish.
        if node.op_type == "Mul" and len(sources) == 2:
            tensor = _find_gated(index, sources)
        elif len(sources) == 1 and node.op_type in _COPIES | _POINTWISE | _WITH_CONSTANT:
            tensor = sources[0]
        else:
            return None
    return None


def _find_gated(index: Graph, sources: list[TensorId]) -> MaybeTensor:
    """x of x * gate(x); None for any other product. sources: the two factors."""
    for factor, gated in (sources, sources[::-1]):
        gate = index.find_producer(factor)
        if (
            gate is not None
            and gate.op_type in ("Sigmoid", "HardSigmoid", "Tanh")
            and list_computed_inputs(index, gate) == [gated]
        ):
            return gated
    return None


def measure_distances(index: Graph, tensor: TensorId) -> dict[TensorId, int]:
    """Every tensor that this one is computed from, with the least number of nodes between."""
    distances = {tensor: 0}
    pending = [tensor]
    for at in pending:
        node = index.find_producer(at)
        # Breadth first: the first way to a tensor is the shortest.
        for source in list_computed_inputs(index, node) if node is not None else ():
            if source not in distances:
                distances[source] = distances[at] + 1
                pending.append(source)
    return distances


def find_residual(c: Candidate) -> tuple[int, TensorId] | None:
    """The end of a residual block: the input of an Add that is the skip branch, and the tensor of the other branch.

    None where the Add ends no such block. The other branch ends in a convolution, whose kernel takes the sum in. Of
    two branches that both end in convolutions, the longer one from their common tensor on is the convolution branch
    (Model-Optimizer's build_non_residual_input_map). Two results of one convolution, and sums of anything else, are no
    residual blocks.
    """
    index = c.index
    sources = list_computed_inputs(index, c.node)
    # A sum with an input of the model has no second branch.
    if len(sources) != 2 or None in map(index.find_producer, sources):
        return None
    ends = [find_backbone(index, tensor) for tensor in sources]
    # So have x + x, and two results of one convolution.
    if ends[0] == ends[1]:
        return None
    first, second = (measure_distances(index, tensor) for tensor in sources)
    # The nearest common tensor; of two as near the first by name, so that the answer is the same on every run.
    common = first.keys() & second.keys()
    parting = min(common, key=lambda t: (first[t] + second[t], t), default=None)
    if None not in ends:
        skip = int(parting is not None and first[parting] > second[parting])
        return skip, sources[1 - skip]
    # Only one branch ends in a convolution. It ends a block unless that convolution makes the common tensor: then it is
    # in front of both branches.
    skip = ends.index(None)
    maker = index.find_producer(parting)
    if maker is not None and maker.name == ends[1 - skip]:
        return None
    return skip, sources[1 - skip]


def multiplies_activations(index: Graph, node: NodeRef) -> bool:
    """True for a MatMul of two activations."""
    return node.op_type == "MatMul" and len(list_computed_inputs(index, node)) == 2


def find_attention(index: Graph, node: NodeRef) -> tuple[str, str] | None:
    """Names of the products (QK^T, PV) of which this MatMul is one: MatMul, scale and mask, Softmax, MatMul.

    None where it is not one of them.
    """
    if not multiplies_activations(index, node):
        return None
    scores = _find_scores(index, node)
    if scores is not None:
        return scores, node.name
    for reader in _find_products_behind(index, node):
        if multiplies_activations(index, reader) and _find_scores(index, reader) == node.name:
            return node.name, reader.name
    return None


def _find_scores(index: Graph, node: NodeRef) -> str | None:
    """Name of the QK^T whose softmax is the left operand of this MatMul; None without one."""
    softmax = _search_backward(index, node, _AFTER_SOFTMAX, "Softmax")
    scores = _search_backward(index, softmax, _SCORING, "MatMul")
    return scores.name if scores is not None and multiplies_activations(index, scores) else None


def _walk_near(
    start: NodeRef, follow: Callable[[NodeRef], Iterable[NodeRef]], most: int = _REACH
) -> Iterator[NodeRef]:
    """The nodes that are reached from one, the nearest first. most: behind so many nodes the walk goes no further."""
    near = [start]
    for node in near:
        yield node
        if len(near) < most:
            near += dict.fromkeys(reached for reached in follow(node) if reached not in near)


def _search_backward(index: Graph, node: MaybeNode, through: NameSet, op_type: str) -> MaybeNode:
    """The nearest node of type `op_type` that input 0 comes from by way of nodes of the types `through`."""

    def list_makers(at: NodeRef) -> list[NodeRef]:
        return index.makers(at) if at.op_type in through else []

    maker = index.maker(node)
    nodes = () if maker is None else _walk_near(maker, list_makers)
    return next((at for at in nodes if at.op_type == op_type), None)


def _find_products_behind(index: Graph, node: NodeRef) -> list[NodeRef]:
    """The MatMuls that read this node's result through scaling, masking and softmax."""

    def list_readers(at: NodeRef) -> list[NodeRef]:
        passes = at == node or at.op_type in _SCORING | _AFTER_SOFTMAX | {"Softmax"}
        return index.readers(at.result) if passes else []

    # Forward a result has several readers, so more nodes are seen at the same depth.
    reached = _walk_near(node, list_readers, 4 * _REACH)
    return [reader for reader in reached if reader.op_type == "MatMul" and reader != node]


def find_attention_cut(c: Candidate) -> MaybeTensor:
    """The result, with its bias, of a product that is cut into query, key and value (one weight for all three).

    None where the result is not cut, or its parts do not reach attention.
    """
    index = c.index
    at = result = c.node.result
    for _ in range(_REACH):
        readers = index.readers(at)
        # Without a pair in front of the cut TensorRT cuts up the weight and multiplies in float.
        if any(reader.op_type in _CUTS for reader in readers):
            return result if any(_reaches_product(index, reader) for reader in readers) else None
        if len(readers) != 1 or index.is_output(at) or not readers[0].outputs[0]:
            return None
        reader = readers[0]
        biased = reader.op_type == "Add" and len(list_computed_inputs(index, reader)) == 1
        if not biased and reader.op_type not in _MOVES:
            return None
        at = reader.result
        result = at if biased else result
    return None


def _reaches_product(index: Graph, node: NodeRef) -> bool:
    """True when a product of attention reads a part of this node's result, moved and scaled."""

    def list_readers(at: NodeRef) -> Iterator[NodeRef]:
        for part in at.results if at.op_type != "MatMul" else ():
            for reader in index.readers(part):
                if reader.op_type in _MOVES | _CUTS | _WITH_CONSTANT | {"MatMul"}:
                    yield reader

    return any(find_attention(index, at) is not None for at in _walk_near(node, list_readers))


# What changes no value.
_UNCHANGED = frozenset(("Cast", "Identity", "Slice", "Pad", "Unsqueeze", "Reshape", "Transpose"))
# What adds no function of its own between two convolutions of one front end (a filter, then a decimated transform).
_LINEAR = _UNCHANGED | {"Neg", "Concat", "Split", "Squeeze"}
# What may stand between a product and the Log behind it.
_SPECTRAL = _LINEAR | {
    *("Pow", "Mul", "Add", "Sub", "Div", "Sqrt", "Abs", "Clip", "Max", "Relu", "Where"),
    *("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "MatMul", "Gemm"),
}
# Tensors behind a product after which the search for a logarithm ends.
_FRONT_END = 200


def explain_log_front_end(candidate: Candidate, _: Candidate | None) -> Reason:
    """A spectrogram front end: a product (STFT, CQT, filters) whose output reaches a Log, or a filter in front of one.

    On the NPU also what stands between them, which elsewhere has no pairs of its own.

    An audio net: 9 dB quantized, 36 dB with its front end float. The loss is in the numbers, not in the kernel.
    """
    # Not the tensor behind the activation that goes with it.
    made = candidate.node.result
    # Whether a linear path reaches the tensor: only such a path may go on through another convolution, so a tensor
    # that another path reached first is looked at again.
    seen = {made: True}
    index = candidate.index
    pending = [made]
    while pending:
        tensor = pending.pop()
        linear = seen[tensor]
        for edge in index.list_consumers(tensor):
            node = index.find_node(edge.node)
            if node.op_type == "Log":
                return f"its output reaches the logarithm {node.name}, which magnifies small errors"
            filtered = linear and node.op_type == "Conv" and edge.index == 0
            if not (filtered or node.op_type in _SPECTRAL) or len(seen) > _FRONT_END:
                continue
            for out in node.results:
                reached = filtered or (linear and node.op_type in _LINEAR)
                if reached > seen.get(out, -1):
                    seen[out] = reached
                    pending.append(out)
    return None


# What may stand between a graph input and the stem.
_PREPROCESSING = _UNCHANGED | {"Sub", "Add", "Mul", "Div"}
# Channels of pictures, with one for transparency; more come from another network.
_STEM_CHANNELS = 4
# Pixels of the map, of a picture of 224 pixels behind a stem of stride 2.
_STEM_DEPTHWISE_PIXELS = 112 * 112
# Nodes between a graph input and the stem; more are a network and no preprocessing.
_PREPROCESSED = 16


# The real and the imaginary part of a spectrum, and the sum of their squares. Normalizations take means as well.
_SQUARES = _LINEAR | {"Pow", "Mul", "Add", "ReduceSumSquare"}
# What the operators of such a transform read it by, a product for the parts among them.
_TRANSFORM = _PREPROCESSING | _SQUARES | {"Conv", "MatMul", "Gemm"}


def explain_magnitude(candidate: Candidate, _: Candidate | None) -> Reason:
    """A transform of a network's input whose output reaches the root of a sum of squares: the size of a spectrum.

    silero_vad, on 4,500 frames, calibrated on 64 loud and quiet ones: 17.0 dB quantized and 24.1 with it float, 96 and
    33 decisions that turn. It costs a quarter of the time that integers save (1.83x float's speed, 1.52x with it).
    """
    reached = [candidate.node.result]
    for tensor in reached:
        for node in candidate.index.readers(tensor):
            if node.op_type == "Sqrt" and _reads_graph_input(candidate, _TRANSFORM):
                return (
                    f"its output reaches the square root {node.name}, which magnifies small errors"
                )
            if node.op_type in _SQUARES and len(reached) < _FRONT_END:
                reached.extend(node.results)
    return None


def explain_counting(candidate: Candidate, _: Candidate | None) -> Reason:
    """Positions and counts that an exporter computes in floats: a step of int8 is another number."""
    counts = counts_in_floats(candidate.index, candidate.node)
    return "counts in whole numbers, which are cast to integers behind it" if counts else None


# Numbers are lost here whatever the kernel: no clock outweighs these.
SENSITIVE: Mapping[str, Exclusion] = {
    "counting": explain_counting,
    "log-front-end": explain_log_front_end,
    "magnitude": explain_magnitude,
}


# EfficientNet-Lite0: .805 -> .859 and 2.0-2.3x -> 2.2-2.6x with the two rules.
def explain_stem(candidate: Candidate, _: Candidate | None = None) -> Reason:
    """The first convolution of a network of pictures."""
    weight = candidate.shape(1) or ()
    dense = candidate.node.op_type == "Conv" and candidate.node.groups == 1
    if not (dense and len(weight) == 4 and weight[1] <= _STEM_CHANNELS):
        return None
    if not _reads_graph_input(candidate):
        return None
    return "the first convolution: int8 gains little, and its noise reaches everything behind it"


def _reads_graph_input(candidate: Candidate, through: Container[str] = _PREPROCESSING) -> bool:
    """True where few operators, of these types, stand between an input of the network and the candidate's data."""
    way = list(candidate.index.walk_back(candidate.tensor(0), through))
    inputs = [TensorId(value.name) for value in candidate.index.inputs]
    return 0 < len(way) <= _PREPROCESSED and way[-1] in inputs


def explain_stem_depthwise(candidate: Candidate, maker: Candidate | None) -> Reason:
    """A depthwise convolution of a large map, with a stem in front of it."""
    weight = candidate.shape(1)
    shape = candidate.shape(0) or ()
    if candidate.node.op_type != "Conv" or weight is None or maker is None or len(shape) != 4:
        return None
    if weight[1] != 1 or candidate.node.groups == 1:
        return None
    # Further ones cost more in layouts than they gain: EfficientNet-Lite0 is 2.2 to 2.6 times as
    # fast with these two in float, and 2.05 times with its first five.
    if explain_stem(maker) is None or shape[2] * shape[3] < _STEM_DEPTHWISE_PIXELS:
        return None
    return "depthwise right behind the stem, on a large map: int8 gains nothing and amplifies the noise"


def check_data(c: Candidate) -> Reason:
    """Why the first input is none that a pair stands at."""
    return "its data is constant" if c.is_constant(0) else None


def check_weighted(c: Candidate) -> Reason:
    """Why a product is not one of computed data and a constant weight, with a constant bias if it has one."""
    if not c.is_constant(1):
        return "its weight is computed at run time"
    if c.tensor(2) is not None and not c.is_constant(2):
        return "its bias is computed at run time"
    return check_data(c)


def check_gemm(c: Candidate) -> Reason:
    """Why a Gemm is more than a product and a bias."""
    factors = (c.node.read_float("alpha", 1.0), c.node.read_float("beta", 1.0))
    if c.node.transposes_data or factors != (1.0, 1.0):
        return "alpha, beta or transA are not the usual ones"
    return explain_columns(c) or check_weighted(c)


def explain_columns(c: Candidate) -> Reason:
    """Why the constant C input of a Gemm is no bias."""
    # An int32 bias has the scales of the weight's columns, one for each.
    bias = c.constant(2)
    weight = c.constant(1)
    columns = 0 if c.node.is_transposed else 1
    if bias is None or weight is None or bias.size == weight.shape[columns]:
        return None
    return "its C input does not hold one bias a column"


def check_all_computed(c: Candidate) -> Reason:
    """Why not every input takes a pair."""
    return "one operand is constant" if any(map(c.is_constant, range(len(c.node.inputs)))) else None


def check_two_activations(c: Candidate) -> Reason:
    """Why the operands are not two activations, each with a scale of its own."""
    same = c.node.inputs[0] == c.node.inputs[1]
    return check_all_computed(c) or ("both operands are the same tensor" if same else None)


def check_gate(c: Candidate) -> Reason:
    """Why a Mul is not a squeeze-excite gate: a map times one value per channel."""
    first = c.shape(0)
    second = c.shape(1)
    if first is None or second is None or len(first) != len(second) or len(first) < 3:
        return "not a gate"
    small = min((first, second), key=math.prod)
    # Two factors of one size are a plain product.
    if any(dim != 1 for dim in small[2:]) or math.prod(first) == math.prod(second):
        return "not a gate"
    return check_two_activations(c)


def check_max_pool(c: Candidate) -> Reason:
    """Why a MaxPool does more than to pick values."""
    return "its indices are read" if len(list(filter(None, c.node.outputs))) > 1 else None


def check_resize(c: Candidate) -> Reason:
    """Why a Resize does more than to repeat values."""
    nearest = c.attr("mode", "nearest") == "nearest"
    return None if nearest else "only nearest is done in integers"


# Rules that kernels of several engines go by.
CONCAT = PlacementRule(
    name="concat",
    ops=("Concat",),
    why="pairs on all inputs and the output, scales may differ",
    data=(),
    check=check_all_computed,
)
MOVE = PlacementRule(
    name="move",
    ops=MOVES,
    why="moves integers: both sides share one scale",
    shares=True,
    check=check_data,
)
RESIZE = replace(MOVE, name="resize-nearest", ops=("Resize",), check=check_resize)
