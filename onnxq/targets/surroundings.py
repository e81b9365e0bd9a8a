"""What placement rules ask of a node's surroundings: where its inputs come from, how far away, and what they meet."""

from __future__ import annotations

from collections import deque

from onnxq.graph import Graph, NodeRef
from onnxq.sites import TensorId

# Nodes that hand a convolution's result on: they copy, move or bound it, or work on one operand beside a constant.
_COPIES = frozenset(
    ("Identity", "Cast", "Dropout", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Pad")
)
_POINTWISE = frozenset(
    ("Relu", "Clip", "LeakyRelu", "PRelu", "HardSwish", "HardSigmoid", "Elu", "Gelu", "Mish", "Sigmoid", "Tanh",
     "BatchNormalization", "MaxPool")
)  # fmt: skip
_WITH_CONSTANT = frozenset(("Add", "Sub", "Mul", "Div"))
_CONVOLUTIONS = ("Conv", "ConvTranspose")
# Between the scores of attention and its softmax.
_SCORING = frozenset(("Add", "Mul", "Div", "Sub", "Where", "Cast", "Identity", "Reshape", "Flatten", "Max", "Clip"))
_AFTER_SOFTMAX = frozenset(("Cast", "Identity", "Dropout", "Where", "Reshape", "Flatten"))
_MOVES = frozenset(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"))
_CUTS = frozenset(("Slice", "Split", "Gather"))
_REACH = 24


def resolved(index: Graph, node: NodeRef) -> list[TensorId]:
    """The computed tensors a node reads, in order."""
    found = [index.resolve(name, node.scope) for name in node.inputs if name]
    return [tensor for tensor in found if tensor is not None and not index.is_constant(tensor)]


def backbone(index: Graph, tensor: TensorId) -> str | None:
    """The convolution this tensor is the (activated, moved) result of, by name; None when something else made it.

    x * sigmoid(x) counts as an activation; a sum or product of two different branches ends the search.
    """
    for _ in range(_REACH):
        node = index.producer(tensor)
        if node is None:
            return None
        if node.op_type in _CONVOLUTIONS:
            return node.name
        sources = resolved(index, node)
        if node.op_type == "Mul" and len(sources) == 2:
            gate = _gated(index, sources)
            if gate is None:
                return None
            tensor = gate
        elif len(sources) == 1 and node.op_type in _COPIES | _POINTWISE | _WITH_CONSTANT:
            tensor = sources[0]
        else:
            return None
    return None


def _gated(index: Graph, sources: list[TensorId]) -> TensorId | None:
    """x of x * gate(x)."""
    for k in (0, 1):
        gate = index.producer(sources[k])
        if gate is not None and gate.op_type in ("Sigmoid", "HardSigmoid", "Tanh"):
            inner = resolved(index, gate)
            if inner == [sources[1 - k]]:
                return sources[1 - k]
    return None


def distances(index: Graph, tensor: TensorId) -> dict[TensorId, int]:
    """Every tensor this one is computed from, with the least number of nodes between."""
    found = {tensor: 0}
    pending = deque([tensor])
    while pending:
        at = pending.popleft()
        node = index.producer(at)
        for source in resolved(index, node) if node is not None else ():
            if source not in found:
                found[source] = found[at] + 1
                pending.append(source)
    return found


def skip_input(index: Graph, node: NodeRef) -> int | None:
    """Which input of an Add is the skip branch of a residual block; None when it is not one.

    The other input is the end of the convolution branch, whose kernel takes the sum in. Of two branches that both end
    in convolutions, the one farther from where they part is the convolution branch (Model-Optimizer's
    build_non_residual_input_map); two results of one convolution, and sums of anything else, are no residual blocks.
    """
    sources = resolved(index, node)
    if len(sources) != 2 or sources[0] == sources[1] or any(index.producer(tensor) is None for tensor in sources):
        return None
    ends = [backbone(index, tensor) for tensor in sources]
    if ends[0] == ends[1]:
        return None
    first, second = (distances(index, tensor) for tensor in sources)
    common = [tensor for tensor in first if tensor in second]
    parting = min(common, key=lambda t: (first[t] + second[t], t), default=None)
    if ends[0] is not None and ends[1] is not None:
        if parting is None:
            return 0
        return 1 if first[parting] > second[parting] else 0
    k = 0 if ends[0] is not None else 1
    maker = None if parting is None else index.producer(parting)
    return None if maker is not None and maker.name == ends[k] else 1 - k


def two_computed(index: Graph, node: NodeRef) -> bool:
    """True for a MatMul of two activations."""
    return node.op_type == "MatMul" and len(resolved(index, node)) == 2


def attention_of(index: Graph, node: NodeRef) -> tuple[str, str] | None:
    """(QK^T, PV) by name, when this MatMul is one of the two: MatMul, scale and mask, Softmax, MatMul."""
    if not two_computed(index, node):
        return None
    scores = _scores_of(index, node)
    if scores is not None:
        return scores, node.name
    for reader in _forward(index, node):
        if two_computed(index, reader) and _scores_of(index, reader) == node.name:
            return node.name, reader.name
    return None


def _scores_of(index: Graph, node: NodeRef) -> str | None:
    """The QK^T whose softmax is this MatMul's left operand."""
    first = index.resolve(node.inputs[0], node.scope)
    softmax = None if first is None else _back_to(index, first, _AFTER_SOFTMAX, "Softmax")
    if softmax is None:
        return None
    scores = _back_to(index, resolved(index, softmax)[0], _SCORING, "MatMul")
    return scores.name if scores is not None and two_computed(index, scores) else None


def _back_to(index: Graph, tensor: TensorId, through: frozenset[str], op_type: str) -> NodeRef | None:
    pending, seen = deque([tensor]), {tensor}
    while pending and len(seen) < _REACH:
        node = index.producer(pending.popleft())
        if node is None:
            continue
        if node.op_type == op_type:
            return node
        if node.op_type in through:
            fresh = [source for source in resolved(index, node) if source not in seen]
            seen.update(fresh)
            pending.extend(fresh)
    return None


def _forward(index: Graph, node: NodeRef) -> list[NodeRef]:
    """What reads this node's result through scaling, masking and softmax."""
    pending, seen, found = deque([node]), {node.name}, []
    while pending and len(seen) < 4 * _REACH:
        at = pending.popleft()
        for edge in index.consumers(TensorId(at.outputs[0], at.scope)):
            reader = index.node(edge.node)
            if reader.name in seen:
                continue
            seen.add(reader.name)
            if reader.op_type == "MatMul":
                found.append(reader)
            elif reader.op_type in _SCORING | _AFTER_SOFTMAX | {"Softmax"}:
                pending.append(reader)
    return found


def cut_for_attention(index: Graph, node: NodeRef) -> TensorId | None:
    """The biased result of a product that is cut into operands of attention (one weight for query, key and value).

    None when the result is not cut, or the parts go elsewhere.
    """
    at = result = TensorId(node.outputs[0], node.scope)
    for _ in range(_REACH):
        readers = [index.node(edge.node) for edge in index.consumers(at)]
        if any(reader.op_type in _CUTS for reader in readers):
            return result if any(_reaches_product(index, reader) for reader in readers) else None
        if len(readers) != 1 or index.is_output(at) or not readers[0].outputs[0]:
            return None
        biased = readers[0].op_type == "Add" and len(resolved(index, readers[0])) == 1
        if not biased and readers[0].op_type not in _MOVES:
            return None
        at = TensorId(readers[0].outputs[0], readers[0].scope)
        result = at if biased else result
    return None


def _reaches_product(index: Graph, node: NodeRef) -> bool:
    """True when an attention product reads what is cut here, moved and scaled."""
    pending, seen = deque([node]), {node.name}
    while pending and len(seen) < _REACH:
        at = pending.popleft()
        for name in at.outputs:
            for edge in index.consumers(TensorId(name, at.scope)) if name else ():
                reader = index.node(edge.node)
                if attention_of(index, reader) is not None:
                    return True
                if reader.name not in seen and reader.op_type in _MOVES | _CUTS | _WITH_CONSTANT:
                    seen.add(reader.name)
                    pending.append(reader)
    return False
