"""Changes after which a model is still whole, and still strange: such models must be quantized, not refused."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.fuzz.graph_edits import graphs

_UNARY = (
    "Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Identity", "Erf", "Softplus", "HardSwish", "Elu", "LeakyRelu", "Floor",
)  # fmt: skip
_NAMES = (
    "/", "x/QuantizeLinear", "w0/scale", "w0/quantized", "x/dequantized", "a:0", "a b", "é", "::", "n" * 300, "1", "%s",
    "",
)  # fmt: skip


def edit_validly(rng: Random, proto: ModelProto) -> str:
    """Change one thing; returns a word for it."""
    edit = rng.choice(_EDITS)
    edit(rng, proto)
    return edit.__name__.strip("_")


def _floats(graph: GraphProto) -> list[TensorProto]:
    return [tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT and len(tensor.dims)]


def _edges(proto: ModelProto) -> list[tuple[NodeProto, int]]:
    """Inputs of main nodes that float data flows through."""
    made = {value.name for value in proto.graph.input if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    for node in proto.graph.node:
        if node.op_type not in ("Shape", "Gather", "Constant", "If", "LSTM", "QuantizeLinear"):
            made.update(node.output)
    skipped = ("Shape", "Gather", "Concat", "QuantizeLinear", "DequantizeLinear")
    return [
        (n, k) for n in proto.graph.node if n.op_type not in skipped for k, name in enumerate(n.input) if name in made
    ]


def _insert(proto: ModelProto, edge: tuple[NodeProto, int], node: NodeProto) -> None:
    at = next(k for k, one in enumerate(proto.graph.node) if one is edge[0] or one == edge[0])
    edge[0].input[edge[1]] = node.output[-1]
    proto.graph.node.insert(at, node)


def _unary(rng: Random, proto: ModelProto) -> None:
    edge = rng.choice(_edges(proto))
    name = f"u{rng.randrange(10**6)}"
    _insert(proto, edge, helper.make_node(rng.choice(_UNARY), [edge[0].input[edge[1]]], [name], name=name))


def _doubled(rng: Random, proto: ModelProto) -> None:
    """The same tensor added to, multiplied with or concatenated to itself."""
    edge = rng.choice(_edges(proto))
    source, name = edge[0].input[edge[1]], f"d{rng.randrange(10**6)}"
    node = helper.make_node(rng.choice(("Add", "Mul", "Max", "Sub")), [source, source], [name], name=name)
    _insert(proto, edge, node)


def _factor(rng: Random, proto: ModelProto) -> None:
    """A product or sum with a number, great, small or 0."""
    edge = rng.choice(_edges(proto))
    value = rng.choice((0.0, 1.0, -1.0, 1e-20, 1e-6, 1e6, 1e15, 0.5))
    name = f"f{rng.randrange(10**6)}"
    shape = rng.choice(((), (1,), (1, 1)))
    proto.graph.initializer.append(numpy_helper.from_array(np.full(shape, value, np.float32), f"{name}c"))
    inputs = [edge[0].input[edge[1]], f"{name}c"]
    node = helper.make_node(rng.choice(("Mul", "Add")), inputs if rng.random() < 0.7 else inputs[::-1], [name])
    _insert(proto, edge, node)


def _clip(rng: Random, proto: ModelProto) -> None:
    edge = rng.choice(_edges(proto))
    low, high = rng.choice(((0, 6), (-1, 1), (0, 0), (1, 2), (3, 1), (-1e30, 1e30), (-2, -1), (0, 1e-30)))
    name = f"k{rng.randrange(10**6)}"
    for part, value in (("l", low), ("h", high)):
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), f"{name}{part}"))
    bounds = rng.choice(([f"{name}l", f"{name}h"], [f"{name}l"], ["", f"{name}h"], []))
    _insert(proto, edge, helper.make_node("Clip", [edge[0].input[edge[1]], *bounds], [name], name=name))


def _output(rng: Random, proto: ModelProto) -> None:
    """A tensor inside, or an input, given out as well."""
    names = [edge[0].input[edge[1]] for edge in _edges(proto)]
    there = {value.name for value in proto.graph.output}
    name = rng.choice(names)
    if name not in there and name not in {value.name for value in proto.graph.input}:
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def _tied(rng: Random, proto: ModelProto) -> None:
    held = _floats(proto.graph)
    pairs = [(a, b) for a in held for b in held if a is not b and a.dims == b.dims]
    if not pairs:
        return
    one, other = rng.choice(pairs)
    for node in proto.graph.node:
        node.input[:] = [one.name if name == other.name else name for name in node.input]


def _weights(rng: Random, proto: ModelProto) -> None:
    """Weights of zeros, with a channel of zeros, hardly any size, one great value, or all alike."""
    held = _floats(proto.graph)
    if not held:
        return
    tensor = rng.choice(held)
    array = np.array(numpy_helper.to_array(tensor))
    kind = rng.randrange(6)
    if kind == 0:
        array[...] = rng.choice((0.0, -0.0, 1.0, -1.0))
    elif kind == 1:
        array[rng.randrange(len(array))] = 0.0
    elif kind == 2:
        array *= np.float32(rng.choice((1e-30, 1e-42, 1e-8, 1e8, 1e12)))
    elif kind == 3:
        array.flat[rng.randrange(array.size)] = rng.choice((1e4, -1e6, 1e10))
    elif kind == 4:
        array[..., rng.randrange(array.shape[-1])] = 0.0
    else:
        array = np.abs(array)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _names(rng: Random, proto: ModelProto) -> None:
    """Nodes without names, all of one name, or of names that pairs get."""
    name = rng.choice((*_NAMES, *(output for node in proto.graph.node for output in node.output)))
    some = list(proto.graph.node) if rng.random() < 0.4 else [rng.choice(list(proto.graph.node))]
    for node in some:
        node.name = name


def _tensor_name(rng: Random, proto: ModelProto) -> None:
    """A tensor renamed wherever it stands, bodies included."""
    old = rng.choice(sorted({name for node in proto.graph.node for name in (*node.input, *node.output) if name}))
    new = rng.choice([name for name in _NAMES if name])
    bodies = graphs(proto)
    if any(new in (*node.input, *node.output) for graph in bodies for node in graph.node):
        return
    for graph in bodies:
        for part in (graph.input, graph.output, graph.initializer, graph.value_info):
            for one in part:
                one.name = new if one.name == old else one.name
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]


def _shapes(rng: Random, proto: ModelProto) -> None:
    """Dims of outputs unknown, symbols renamed, types inside forgotten or written down."""
    kind = rng.randrange(3)
    if kind == 0:
        for value in proto.graph.output:
            value.type.tensor_type.ClearField("shape")
    elif kind == 1:
        for value in (*proto.graph.input, *proto.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param"):
                    dim.dim_param = rng.choice(("batch size", "é", "N/2", "unk__1"))
    else:
        proto.CopyFrom(onnx.shape_inference.infer_shapes(proto))


def _moved(rng: Random, proto: ModelProto) -> None:
    """A weight in a Constant node, behind an Identity, or listed as an input too."""
    held = _floats(proto.graph)
    if not held:
        return
    tensor = TensorProto()
    tensor.CopyFrom(rng.choice(held))
    kind = rng.randrange(3)
    if kind == 2:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        return
    at = next(k for k, one in enumerate(proto.graph.initializer) if one.name == tensor.name)
    if kind == 0:
        del proto.graph.initializer[at]
        proto.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    else:
        proto.graph.initializer[at].name = inner = f"i{rng.randrange(10**6)}"
        proto.graph.node.insert(0, helper.make_node("Identity", [inner], [tensor.name]))


def _opset(rng: Random, proto: ModelProto) -> None:
    version = rng.choice((17, 18, 19, 20, 21, 22, 23))
    for entry in proto.opset_import:
        entry.version = version if entry.domain == "" else entry.version
    proto.ir_version = rng.choice((8, 9, 10)) if version < 21 else 10


def _unused(rng: Random, proto: ModelProto) -> None:
    """Nodes and weights that nothing reads, of names that pairs might take."""
    edge = rng.choice(_edges(proto))
    name = rng.choice(
        (f"dead{rng.randrange(99)}", f"{edge[0].input[edge[1]]}/scale", f"{edge[0].input[edge[1]]}/dequantized")
    )
    if any(name in (*node.output, *node.input) for node in proto.graph.node):
        return
    if rng.random() < 0.5:
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), name))
    else:
        proto.graph.node.append(helper.make_node("Relu", [edge[0].input[edge[1]]], [name]))


_EDITS: tuple[Callable[[Random, ModelProto], Any], ...] = (
    _unary, _unary, _doubled, _factor, _clip, _output, _tied, _weights, _weights, _names, _tensor_name, _shapes, _moved,
    _opset, _unused,
)  # fmt: skip
