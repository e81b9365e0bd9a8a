"""Decoding what protobuf holds: attributes, constant tensors, types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto, numpy_helper

from onnxq.errors import ModelError
from onnxq.graph.held import held_array, is_held

Dims = tuple[int | str | None, ...]

# How Constant spells its value; "sparse_value" is decoded apart.
_CONSTANT_DTYPES: dict[str, int] = {
    "value_float": TensorProto.FLOAT,
    "value_floats": TensorProto.FLOAT,
    "value_int": TensorProto.INT64,
    "value_ints": TensorProto.INT64,
    "value_string": TensorProto.STRING,
    "value_strings": TensorProto.STRING,
}


# Bytes; protobuf stops there.
_MAX_DENSE = 2**31


def decode_tensor(tensor: TensorProto) -> NDArray[Any]:
    """The tensor as a read-only array; bfloat16, float8, sub-byte types as ml_dtypes. Raises ModelError if corrupt."""
    if is_held(tensor):
        return held_array(tensor)
    try:
        array = numpy_helper.to_array(tensor)
    except Exception as error:
        cause = f"its values cannot be read ({error})"
        raise ModelError(tensor.name or "a tensor", cause, "export it again", code="Q105") from error
    array = np.asarray(array)
    array.setflags(write=False)
    return array


def decode_sparse(sparse: SparseTensorProto) -> NDArray[Any]:
    """The dense, read-only form of a sparse tensor (indices linear [NNZ] or [NNZ, rank]).

    Raises ModelError for indices that its dims do not have, and for dims that no model file could hold densely.
    """
    values = decode_tensor(sparse.values)
    indices = decode_tensor(sparse.indices)
    name, dims = sparse.values.name or "a sparse tensor", tuple(sparse.dims)
    if min(dims, default=0) < 0 or math.prod(dims) * values.itemsize > _MAX_DENSE:
        raise ModelError(
            name, f"its shape {list(dims)} is too large to be stored densely", "export it again", code="Q105"
        )
    dense = np.zeros(dims, dtype=values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise ModelError(
            name, f"its indices do not fit its shape {list(dims)} ({error})", "export it again", code="Q105"
        ) from error
    dense.setflags(write=False)
    return dense


def constant_attribute(node: NodeProto) -> AttributeProto | None:
    """The attribute that holds a Constant node's value; None when it refers to a function's attribute."""
    held = ("value", "sparse_value", *_CONSTANT_DTYPES)
    attr: AttributeProto
    for attr in node.attribute:
        if attr.name in held and not attr.ref_attr_name:
            return attr
    return None


def constant_value(node: NodeProto) -> NDArray[Any] | None:
    """The value of a Constant node, None when it has none of its own."""
    attr = constant_attribute(node)
    if attr is None:
        return None
    if attr.name == "value":
        return decode_tensor(attr.t)
    if attr.name == "sparse_value":
        return decode_sparse(attr.sparse_tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(_CONSTANT_DTYPES[attr.name])
    array = np.asarray(onnx.helper.get_attribute_value(attr), dtype=dtype)
    array.setflags(write=False)
    return array


def constant_type(node: NodeProto) -> tuple[int, Dims] | None:
    """(dtype, shape) of a Constant node without decoding its value."""
    attr = constant_attribute(node)
    if attr is None:
        return None
    if attr.name == "value":
        return attr.t.data_type, tuple(attr.t.dims)
    if attr.name == "sparse_value":
        return attr.sparse_tensor.values.data_type, tuple(attr.sparse_tensor.dims)
    length = {
        AttributeProto.FLOATS: len(attr.floats),
        AttributeProto.INTS: len(attr.ints),
        AttributeProto.STRINGS: len(attr.strings),
    }
    return _CONSTANT_DTYPES[attr.name], (length[attr.type],) if attr.type in length else ()


def declared_type(value: ValueInfoProto) -> tuple[int, Dims | None]:
    """(dtype, shape) a ValueInfoProto declares; dtype 0 for what is not a dense tensor, shape None when unknown."""
    if value.type.WhichOneof("value") != "tensor_type":
        return 0, None
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple(
        # Exporters write -1 for what they do not know, which the checker lets pass.
        (dim.dim_value if dim.dim_value >= 0 else None) if dim.HasField("dim_value") else _symbol(dim.dim_param)
        for dim in tensor.shape.dim
    )


def _symbol(name: str) -> str | None:
    # Paddle writes "?" for every dim it does not know: not one symbol that makes them equal.
    return None if name in ("", "?") else name


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def attribute_value(attr: AttributeProto) -> Any:
    """int, float, str, tuple of these, or array; other kinds (types, sparse tensors) as their protobuf message."""
    value = onnx.helper.get_attribute_value(attr)
    if attr.type == AttributeProto.TENSOR:
        return decode_tensor(attr.t)
    if attr.type == AttributeProto.STRING:
        return _text(attr.s)
    if attr.type == AttributeProto.STRINGS:
        return tuple(_text(raw) for raw in attr.strings)
    if attr.type == AttributeProto.TENSORS:
        return tuple(decode_tensor(tensor) for tensor in attr.tensors)
    return tuple(value) if isinstance(value, list) else value


class Attributes(Mapping[str, Any]):
    """A node's attributes, decoded when asked for; bodies and references to a function's attributes are left out."""

    def __init__(self, node: NodeProto) -> None:
        self._raw = {
            attr.name: attr
            for attr in node.attribute
            if attr.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS) and not attr.ref_attr_name
        }
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = attribute_value(self._raw[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return f"Attributes({', '.join(self._raw)})"
