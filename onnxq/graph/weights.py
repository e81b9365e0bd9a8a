"""Weights left out while a tool of onnx works on the graph, so that it stays fast and takes models over 2 GB.

`omit_weights` gives the model without the bytes of its large tensors (names, dtypes and dims stay), `restore_weights`
puts them back. Tensors are found again by name and graph, a subgraph by the first output of its parent node: no tool
changes these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxq.errors import ModelError
from onnxq.graph.scopes import find_result, iterate_subgraphs, name_function
from onnxq.graph.stored import is_external, walk_tensors
from onnxq.spec import ELEMENT_TYPES

# Bytes. Shapes, axes and pads are smaller: tools look at their values, so they stay.
SMALL_BYTES = 4096
# Location of a stub of light.py. A path without a file extension in a folder: no exporter writes this one.
STUB_LOCATION = "onnxq/held"


# The original tensors that were left out, by place and the name of the initializer or the Constant's output: no two
# tensors of one graph share a name.
Omitted = dict[tuple[str, str], TensorProto]
# By their names in lower case, as in QuantSpec; which of them there are depends on the onnx release.
TENSOR_TYPES: dict[str, int] = {name.lower(): number for name, number in TensorProto.DataType.items()}
# Other types fill the bytes that numpy has for them.
_BITS = {TENSOR_TYPES[name]: kind.bits for name, kind in ELEMENT_TYPES.items() if name in TENSOR_TYPES}


def count_tensor_bytes(tensor: TensorProto) -> int:
    """The bytes the tensor's dims and dtype ask for (sub-byte types packed; strings count as stored)."""
    if tensor.data_type == TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    kind = tensor.data_type
    bits = _BITS[kind] if kind in _BITS else 8 * int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
    count: int = math.prod(tensor.dims)
    return (count * bits + 7) // 8


def count_model_bytes(proto: ModelProto) -> int:
    """The bytes of all tensors inside the model together: about its size when it is serialized."""
    return sum(count_tensor_bytes(tensor) for tensor in walk_tensors(proto) if not is_external(tensor))


def is_stub(tensor: TensorProto) -> bool:
    """True for a tensor whose values lie in the WeightStore of its model (see light.py)."""
    return is_external(tensor) and any(entry.value == STUB_LOCATION for entry in tensor.external_data)


def check_tensors(proto: ModelProto, subject: str) -> None:
    """Raise ModelError for a tensor whose stored bytes do not match its dims (onnx.checker never sees the weights)."""
    known = set(onnx.helper.get_all_tensor_dtypes())
    for tensor in walk_tensors(proto):
        where = f"{subject}, tensor {tensor.name!r}"
        if tensor.data_type not in known:
            cause = f"has the unknown element type {tensor.data_type}"
            raise ModelError(where, cause, "export it again, or upgrade onnx", code="Q105")
        if is_external(tensor) or not tensor.HasField("raw_data"):
            continue
        wanted = count_tensor_bytes(tensor)
        if len(tensor.raw_data) != wanted:
            cause = f"its shape {list(tensor.dims)} needs {wanted} bytes, {len(tensor.raw_data)} are stored"
            raise ModelError(where, cause, "the file is damaged; export or copy it again", code="Q105")


def omit_weights(proto: ModelProto, *, empty: bool = False, functions: bool = True) -> tuple[ModelProto, Omitted]:
    """The model without its large tensors' bytes, built without ever copying them, and those tensors.

    empty: also give them dims [0], which onnx.checker accepts as a tensor without data. functions: functions too.
    """
    omitted: Omitted = {}
    light = ModelProto()
    copy_fields(proto, light, ("graph", "functions"))
    _omit_in_graph(proto.graph, light.graph, "", omitted, empty)
    for function in proto.functions:
        target = light.functions.add()
        if not functions:
            target.CopyFrom(function)
            continue
        copy_fields(function, target, ("node",))
        _omit_in_nodes(function, target, name_function(function), omitted, empty)
    return light, omitted


def _omit_in_graph(source: GraphProto, target: GraphProto, place: str, omitted: Omitted, empty: bool) -> None:
    copy_fields(source, target, ("node", "initializer"))
    for tensor in source.initializer:
        if is_large(tensor):
            omitted[place, tensor.name] = tensor
            _write_stub(tensor, target.initializer.add(), empty)
        else:
            target.initializer.add().CopyFrom(tensor)
    _omit_in_nodes(source, target, place, omitted, empty)


def _omit_in_nodes(
    source: GraphProto | FunctionProto,
    target: GraphProto | FunctionProto,
    place: str,
    omitted: Omitted,
    empty: bool,
) -> None:
    for node in source.node:
        copy = target.node.add()
        copy_fields(node, copy, ("attribute",))
        for attr in node.attribute:
            _omit_in_attribute(node, attr, copy.attribute.add(), place, omitted, empty)


def _omit_in_attribute(
    node: NodeProto, attr: AttributeProto, copy: AttributeProto, place: str, omitted: Omitted, empty: bool
) -> None:
    copy_fields(attr, copy, ("t", "g", "graphs"))
    if attr.type == AttributeProto.GRAPH:
        _omit_in_graph(attr.g, copy.g, _join_place(place, node, attr.name), omitted, empty)
    elif attr.type == AttributeProto.GRAPHS:
        for i, subgraph in enumerate(attr.graphs):
            _omit_in_graph(subgraph, copy.graphs.add(), _join_place(place, node, f"{attr.name}[{i}]"), omitted, empty)
    elif attr.HasField("t"):
        if _holds_value(node, attr) and is_large(attr.t):
            omitted[place, node.output[0]] = attr.t
            _write_stub(attr.t, copy.t, empty)
        else:
            copy.t.CopyFrom(attr.t)


def _holds_value(node: NodeProto, attr: AttributeProto) -> bool:
    return node.op_type == "Constant" and attr.name == "value"


def locate_tensors(proto: ModelProto, *, constants: bool = True) -> Iterator[tuple[tuple[str, str], TensorProto]]:
    """Every initializer, and with `constants` every value of a Constant, under the key an Omitted has for it."""
    waiting: list[tuple[str, GraphProto | FunctionProto]] = [("", proto.graph)]
    waiting.extend((name_function(function), function) for function in proto.functions)
    while waiting:
        place, graph = waiting.pop()
        if isinstance(graph, GraphProto):
            yield from (((place, tensor.name), tensor) for tensor in graph.initializer)
        for node in graph.node:
            waiting.extend((_join_place(place, node, label), subgraph) for label, subgraph in iterate_subgraphs(node))
            values = (attr.t for attr in node.attribute if constants and _holds_value(node, attr))
            yield from (((place, node.output[0]), value) for value in values)


def restore_weights(light: ModelProto, omitted: Omitted) -> ModelProto:
    """A full model from a light one: every tensor of the omitted that is still there gets its bytes back.

    The light model may have been edited, as long as its tensors keep their names.
    """
    full = deepcopy(light)
    for key, tensor in locate_tensors(full):
        if key in omitted:
            tensor.CopyFrom(omitted[key])
    return full


def _join_place(place: str, node: NodeProto, label: str) -> str:
    return f"{place}/{find_result(node) or node.name}.{label}"


def is_large(tensor: TensorProto) -> bool:
    """True for a tensor that `omit_weights` leaves out."""
    return is_external(tensor) or count_tensor_bytes(tensor) > SMALL_BYTES


def _write_stub(source: TensorProto, target: TensorProto, empty: bool) -> None:
    for name in ("name", "data_type", "doc_string"):
        if source.HasField(name):
            setattr(target, name, getattr(source, name))
    target.metadata_props.extend(source.metadata_props)
    target.dims.extend([0] if empty else source.dims)
    if source.data_type != TensorProto.STRING:
        # Tools ask which field holds the values; an empty one is an answer.
        target.raw_data = b""


def copy_fields(source: object, target: object, leave_out: tuple[str, ...]) -> None:
    """Copy a message field by field: CopyFrom and clearing after would keep the weights' memory alive."""
    for descriptor, value in source.ListFields():  # type: ignore[attr-defined]
        if descriptor.name in leave_out:
            continue
        # How a descriptor says "repeated" has changed between protobuf releases; the containers have not.
        if hasattr(value, "extend"):
            getattr(target, descriptor.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            setattr(target, descriptor.name, value)
