"""Changes to a ModelProto that its reader may not expect; each says in a word which it is."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.fuzz.tensor_edits import DIMS, FLOATS, INTS, change_values, damage_tensor

_NAMES = (
    "", " ", "x", "y", "node_0", "a/b", "a:b", "w0/scale", "w0/quantized", "x/QuantizeLinear", "é", "n" * 3000, "a\0b",
    "-",
)  # fmt: skip
_OPS = (
    "Add", "MatMul", "Conv", "Relu", "Gemm", "Softmax", "Reshape", "Transpose", "Identity", "Concat", "Mul", "Clip",
    "Split", "QuantizeLinear", "DequantizeLinear", "LSTM", "If", "Loop", "Scan", "Constant", "Shape", "Dropout",
    "Cast", "Resize", "LayerNormalization", "BatchNormalization", "NonZero", "SequenceConstruct", "Einsum",
    "RandomNormal", "TopK", "Pad",
)  # fmt: skip


def graphs(proto: ModelProto) -> list[GraphProto]:
    """The main graph and every body in it."""
    found, waiting = [], [proto.graph]
    while waiting:
        graph = waiting.pop()
        found.append(graph)
        for node in graph.node:
            waiting.extend(attr.g for attr in node.attribute if attr.type == AttributeProto.GRAPH)
    return found


def edit_model(rng: Random, proto: ModelProto) -> str:
    """Change one thing; returns a word for it."""
    edit = rng.choice(_EDITS)
    edit(rng, proto, rng.choice(graphs(proto)))
    return edit.__name__.strip("_")


def _node(rng: Random, graph: GraphProto) -> NodeProto:
    return rng.choice(list(graph.node)) if graph.node else graph.node.add()


def _names(proto: ModelProto) -> list[str]:
    """Every tensor's name, later ones and those of other bodies too."""
    found: dict[str, None] = {}
    for graph in graphs(proto):
        for part in (graph.input, graph.initializer, graph.output):
            found.update(dict.fromkeys(one.name for one in part))
        for node in graph.node:
            found.update(dict.fromkeys((*node.input, *node.output)))
    return list(found)


def _attribute_value(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    held = [attr for node in graph.node for attr in node.attribute]
    if not held:
        return _attribute_new(rng, proto, graph)
    attr = rng.choice(held)
    if attr.type == AttributeProto.INT:
        attr.i = rng.choice(INTS)
    elif attr.type == AttributeProto.INTS and attr.ints:
        kind = rng.randrange(4)
        if kind == 0:
            del attr.ints[rng.randrange(len(attr.ints)) :]
        elif kind == 1:
            attr.ints.append(rng.choice(INTS))
        else:
            attr.ints[rng.randrange(len(attr.ints))] = rng.choice(INTS)
    elif attr.type == AttributeProto.FLOAT:
        attr.f = rng.choice(FLOATS)
    elif attr.type == AttributeProto.STRING:
        attr.s = rng.choice((b"", b"SAME_UPPER", b"\xff\xfe", b"nearest", b"x" * 1000))
    elif attr.type == AttributeProto.TENSOR:
        damage_tensor(rng, attr.t)
    else:
        attr.name = rng.choice(_NAMES)
    return None


def _attribute_kind(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    held = [attr for node in graph.node for attr in node.attribute]
    if held:
        attr = rng.choice(held)
        kind = rng.randrange(4)
        if kind == 0:
            attr.type = rng.randrange(15)
        elif kind == 1:
            attr.ClearField("type")
        elif kind == 2:
            attr.ref_attr_name = rng.choice(("", "slope", "nothing"))
        else:
            attr.CopyFrom(helper.make_attribute(attr.name or "a", rng.choice((1, 1.0, "s", [1, 2], [0.5], ["a"]))))


def _attribute_drop(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    node = _node(rng, graph)
    if node.attribute:
        at = rng.randrange(len(node.attribute))
        if rng.random() < 0.3:
            node.attribute.add().CopyFrom(node.attribute[at])
        else:
            del node.attribute[at]


def _attribute_new(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    name = rng.choice(
        ("axis", "auto_pad", "group", "to", "bits", "axes", "perm", "value", "kernel_shape", "body", "alpha", "é")
    )
    _node(rng, graph).attribute.append(
        helper.make_attribute(name, rng.choice((rng.choice(INTS), 0.5, "VALID", [1, 1], [rng.choice(INTS)], ["a"])))
    )


def _wires(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """An input, or more seldom an output, left out, put in between or exchanged."""
    node, names = _node(rng, graph), (*_names(proto), "", "nowhere")
    wires = rng.choice((node.input, node.input, node.output))
    kind = rng.randrange(5)
    if kind == 0 and wires:
        del wires[rng.randrange(len(wires))]
    elif kind == 1:
        wires.insert(rng.randrange(len(wires) + 1), rng.choice(names))
    elif wires:
        wires[rng.randrange(len(wires))] = rng.choice(names)


def _tensor(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    held = [attr.t for node in graph.node for attr in node.attribute if attr.type == AttributeProto.TENSOR]
    if tensors := [*graph.initializer, *held]:
        rng.choice((damage_tensor, change_values))(rng, rng.choice(tensors))


def _initializer(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    if not graph.initializer:
        return
    at = rng.randrange(len(graph.initializer))
    kind = rng.randrange(5)
    if kind == 0:
        del graph.initializer[at]
    elif kind == 1:
        graph.initializer.add().CopyFrom(graph.initializer[at])
    elif kind == 2:
        graph.initializer[at].name = rng.choice((*_NAMES, *_names(proto)))
    elif kind == 3:
        tensor = graph.initializer[at]
        graph.input.append(
            helper.make_tensor_value_info(tensor.name, rng.choice((1, 7, tensor.data_type)), list(tensor.dims))
        )
    else:
        tensor = TensorProto()
        tensor.CopyFrom(graph.initializer[at])
        del graph.initializer[at]
        graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))


def _interface(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    values = [*graph.input, *graph.output, *graph.value_info]
    if not values:
        return
    value = rng.choice(values)
    tensor = value.type.tensor_type
    kind = rng.randrange(8)
    if kind == 0:
        value.name = rng.choice((*_NAMES, *_names(proto)))
    elif kind == 1:
        tensor.elem_type = rng.randrange(30)
    elif kind == 2 and tensor.shape.dim:
        rng.choice(list(tensor.shape.dim)).dim_value = rng.choice(DIMS)
    elif kind == 3 and tensor.shape.dim:
        rng.choice(list(tensor.shape.dim)).dim_param = rng.choice(("N", "M", "", "?", "N*2", "é"))
    elif kind == 4:
        tensor.shape.dim.add().dim_value = rng.choice(DIMS)
    elif kind == 5:
        tensor.ClearField("shape")
    elif kind == 6:
        value.ClearField("type")
    else:
        inner = onnx.TypeProto()
        inner.CopyFrom(value.type)
        value.type.Clear()
        rng.choice((value.type.sequence_type, value.type.optional_type)).elem_type.CopyFrom(inner)


def _sparse(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """A weight stored sparsely, or not quite."""
    held = [t for t in graph.initializer if t.data_type == TensorProto.FLOAT and t.name and not t.external_data]
    if not held:
        return
    tensor = rng.choice(held)
    try:
        array = numpy_helper.to_array(tensor)
    except Exception:  # damaged before
        return
    at = np.flatnonzero(array).astype(np.int64)
    made = helper.make_sparse_tensor(
        numpy_helper.from_array(array.reshape(-1)[at], tensor.name), numpy_helper.from_array(at, ""), list(array.shape)
    )
    if rng.random() < 0.4 and len(made.dims):
        made.dims[rng.randrange(len(made.dims))] = rng.choice(DIMS)
    elif rng.random() < 0.4:
        damage_tensor(rng, rng.choice((made.values, made.indices)))
    graph.initializer.remove(tensor)
    if rng.random() < 0.5:
        graph.sparse_initializer.append(made)
    else:
        graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], sparse_value=made))


def _listed(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """Inputs, outputs and types said twice, left out, or of tensors that nobody meant."""
    part = rng.choice((graph.input, graph.output, graph.value_info))
    kind = rng.randrange(3)
    if kind == 0 and part:
        part.add().CopyFrom(rng.choice(list(part)))
    elif kind == 1 and part:
        del part[rng.randrange(len(part))]
    else:
        part.append(
            helper.make_tensor_value_info(rng.choice((*_names(proto), "ghost")), rng.choice((1, 6, 10)), [2, 8])
        )


def _node_edit(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    if not graph.node:
        return
    at = rng.randrange(len(graph.node))
    node = graph.node[at]
    kind = rng.randrange(7)
    if kind == 0:
        del graph.node[at]
    elif kind == 1:
        graph.node.add().CopyFrom(node)
    elif kind == 2:
        copied = NodeProto()
        copied.CopyFrom(node)
        del graph.node[at]
        graph.node.insert(rng.randrange(len(graph.node) + 1), copied)
    elif kind == 3:
        node.op_type = rng.choice((*_OPS, "", "Strange"))
    elif kind == 4:
        node.domain = rng.choice(("ai.onnx", "ai.onnx.ml", "com.microsoft", "local", "nobody", "é"))
    elif kind == 5:
        node.name = rng.choice(_NAMES)
    else:
        other = rng.choice(list(graph.node))
        node.name, other.name = other.name, node.name


def _opset(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        rng.choice(list(proto.opset_import) or [proto.opset_import.add()]).version = rng.choice(
            (-1, 0, 1, 6, 7, 9, 10, 11, 12, 13, 18, 21, 22, 23, 99, 2**62)
        )
    elif kind == 1:
        proto.opset_import.append(
            helper.make_opsetid(rng.choice(("", "ai.onnx", "ai.onnx.ml", "x")), rng.choice((1, 13, 17)))
        )
    elif kind == 2:
        del proto.opset_import[:1]
    elif kind == 3:
        proto.ir_version = rng.choice((0, 1, 3, 4, 7, 10, 11, 99, -1))
    else:
        rng.choice(list(proto.opset_import) or [proto.opset_import.add()]).domain = rng.choice(("", "ai.onnx", "x"))


def _pair(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """A quantize/dequantize pair on an edge, its numbers good or not."""
    node = _node(rng, graph)
    if not node.input:
        return
    at, tag = rng.randrange(len(node.input)), f"p{rng.randrange(10**6)}"
    scale = np.asarray(rng.choice((0.05, 0.0, -0.1, 1e-30, 1e30, float("nan"), [0.1, 0.2], [[0.1]])), np.float32)
    zero = np.zeros(rng.choice((scale.shape, ())), rng.choice((np.int8, np.uint8, np.int32, np.uint16)))
    graph.initializer.append(numpy_helper.from_array(scale, f"{tag}s"))
    graph.initializer.append(numpy_helper.from_array(zero, f"{tag}z"))
    where = list(graph.node).index(node)
    source = node.input[at]
    node.input[at] = f"{tag}d"
    second = rng.choice((f"{tag}s", f"{tag}s", source))
    graph.node.insert(where, helper.make_node("DequantizeLinear", [f"{tag}q", second, f"{tag}z"], [f"{tag}d"]))
    graph.node.insert(where, helper.make_node("QuantizeLinear", [source, f"{tag}s", f"{tag}z"], [f"{tag}q"]))


def _body(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """A node moved into both branches of an If, or into the body of a Loop, which reads from outside."""
    if not graph.node:
        return
    at = rng.randrange(len(graph.node))
    inner = NodeProto()
    inner.CopyFrom(graph.node[at])
    outputs = list(inner.output)
    made = [onnx.ValueInfoProto(name=f"{name}_in") for name in outputs if name]
    for k, name in enumerate(outputs):
        inner.output[k] = f"{name}_in" if name else ""
    tag = f"c{rng.randrange(10**6)}"
    if rng.random() < 0.6:
        body = helper.make_graph([inner], "body", [], made)
        node = helper.make_node("If", [tag], [name for name in outputs if name], then_branch=body, else_branch=body)
        graph.initializer.append(numpy_helper.from_array(np.asarray(rng.random() < 0.5), tag))
    else:
        again = helper.make_node("Identity", [f"{tag}c"], [f"{tag}o"])
        body = helper.make_graph(
            [inner, again], "body",
            [helper.make_tensor_value_info(f"{tag}i", 7, []), helper.make_tensor_value_info(f"{tag}c", 9, [])],
            [onnx.ValueInfoProto(name=f"{tag}o"), *made],
        )  # fmt: skip
        node = helper.make_node("Loop", [tag, ""], [name for name in outputs if name], body=body)
        graph.initializer.append(numpy_helper.from_array(np.asarray(2, np.int64), tag))
    del graph.node[at]
    graph.node.insert(at, node)


def _function(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """A function that calls itself, hides an operator, or has what its call lacks."""
    domain, name = rng.choice((("local", "layer"), ("", "Relu"), ("local", "loop")))
    inside = rng.choice(((domain, name), ("", "Relu"), ("local", "layer")))
    call = helper.make_node(inside[1], ["v"], ["o"], domain=inside[0])
    proto.functions.append(
        helper.make_function(domain, name, ["v"], rng.choice((["o"], [], ["q"])), [call], [helper.make_opsetid("", 17)])
    )
    if graph.node:
        node = _node(rng, graph)
        node.op_type, node.domain = name, domain


def _metadata(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    key = rng.choice(("onnxq.bits", "onnxq.plan", "onnxq.target", "", "é", "onnxq.waiting-attribute-bits"))
    value = rng.choice(("", "{", "[]", "null", '{"a": 1}', '{"schema": 1}', '{"node_0": {"bits": "x"}}', "8", "\0"))
    for _ in range(rng.choice((1, 2))):
        rng.choice((proto, graph, _node(rng, graph))).metadata_props.add(key=key, value=value)


def _annotation(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    note = graph.quantization_annotation.add(tensor_name=rng.choice((*_names(proto), "", "ghost")))
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=rng.choice((*_names(proto), "ghost")))


def _edge_swap(rng: Random, proto: ModelProto, graph: GraphProto) -> None:
    """Two edges exchanged: shapes that do not fit, cycles, weights where data was."""
    one, other = _node(rng, graph), _node(rng, graph)
    if one.input and other.input:
        a, b = rng.randrange(len(one.input)), rng.randrange(len(other.input))
        one.input[a], other.input[b] = other.input[b], one.input[a]


_EDITS: tuple[Callable[[Random, ModelProto, GraphProto], Any], ...] = (
    _attribute_value, _attribute_value, _attribute_kind, _attribute_drop, _attribute_new, _wires, _wires, _wires,
    _tensor, _tensor, _tensor, _tensor, _initializer, _interface, _interface, _listed, _node_edit, _node_edit, _opset,
    _pair, _body, _sparse, _function, _metadata, _annotation, _edge_swap,
)  # fmt: skip
