"""Between protobuf and numpy: tensors both ways, attributes, constants, declared types."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from onnxq.arrays import Array
from onnxq.errors import ModelError
from onnxq.graph.base import Dims
from onnxq.graph.light import WeightStore
from onnxq.graph.storage import TENSOR_TYPES, is_stub

# How Constant spells its value; "sparse_value" is decoded apart.
_CONSTANT_DTYPES = {
    "value_float": TensorProto.FLOAT,
    "value_floats": TensorProto.FLOAT,
    "value_int": TensorProto.INT64,
    "value_ints": TensorProto.INT64,
    "value_string": TensorProto.STRING,
    "value_strings": TensorProto.STRING,
}


# Bytes: protobuf's limit on one message.
_MAX_DENSE = 2**31


def decode_tensor(tensor: TensorProto, store: WeightStore | None = None) -> Array:
    """Return the tensor as a read-only array; bfloat16, float8, sub-byte types as ml_dtypes.

    store: of the model the tensor belongs to, for stubs. Raises ModelError for a damaged tensor.
    """
    if store is not None and is_stub(tensor):
        return store.array(tensor)
    try:
        array = numpy_helper.to_array(tensor)
    except Exception as error:
        cause = f"its values cannot be read ({error})"
        raise ModelError(
            tensor.name or "a tensor", cause, "export it again", code="Q105"
        ) from error
    array = np.asarray(array)
    # It may be the very memory of the message, or be shared by all that ask the index for it.
    array.setflags(write=False)
    return array


def encode_tensor(
    name: str, array: Array, dtype: int | None = None, *, store: WeightStore | None = None
) -> TensorProto:
    """Return a TensorProto named `name`, for the main graph a stub where `store` takes the array.

    dtype: an onnx.TensorProto type, by default the array's own. store: keeps large arrays, which must not change then.
    Sub-byte integers are given as ordinary integers and packed little end first (the ONNX spec of raw_data). Raises
    ModelError when a value does not fit the type.
    """
    array = np.asarray(array)
    target = array.dtype if dtype is None else onnx.helper.tensor_dtype_to_np_dtype(dtype)
    if target.kind in "OSU":
        return numpy_helper.from_array(array.astype(object), name)
    stored = array.astype(target, copy=False)
    # Casting wraps around or cuts off in silence; there and back again shows it.
    if array.dtype != target and not np.array_equal(
        stored.astype(array.dtype), array, equal_nan=array.dtype.kind == "f"
    ):
        cause = f"its values do not fit {target.name}"
        raise ModelError(name, cause, "saturate or round them first", code="Q117")
    stub = TensorProto(
        name=name, data_type=onnx.helper.np_dtype_to_tensor_dtype(target), dims=stored.shape
    )
    if store is not None and store.put(stub, stored):
        return stub
    whole = numpy_helper.from_array(stored, name)
    return stub if store is not None and store.put_packed(stub, whole.raw_data) else whole


def decode_sparse(sparse: onnx.SparseTensorProto) -> Array:
    """The dense, read-only form of a sparse tensor (indices linear [NNZ] or [NNZ, rank]).

    Raises ModelError for indices that its dims do not have, and for dims that no model file could hold densely.
    """
    values = decode_tensor(sparse.values)
    indices = decode_tensor(sparse.indices)
    name = sparse.values.name or "a sparse tensor"
    dims = tuple(sparse.dims)
    if min(dims, default=0) < 0 or math.prod(dims) * values.itemsize > _MAX_DENSE:
        cause = f"its shape {list(dims)} is too large to be stored densely"
        raise ModelError(name, cause, "export it again", code="Q105")
    dense = np.zeros(dims, dtype=values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        cause = f"its indices do not fit its shape {list(dims)} ({error})"
        raise ModelError(name, cause, "export it again", code="Q105") from error
    dense.setflags(write=False)
    return dense


def find_constant_attribute(node: NodeProto) -> AttributeProto | None:
    """The attribute that holds a Constant node's value; None when it refers to a function's attribute."""
    names = ("value", "sparse_value", *_CONSTANT_DTYPES)
    return next(
        (attr for attr in node.attribute if attr.name in names and not attr.ref_attr_name), None
    )


def decode_constant(attr: AttributeProto) -> Array:
    """The value of a Constant node, which this attribute holds."""
    if attr.name == "value":
        return decode_tensor(attr.t)
    if attr.name == "sparse_value":
        return decode_sparse(attr.sparse_tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(_CONSTANT_DTYPES[attr.name])
    array = np.asarray(onnx.helper.get_attribute_value(attr), dtype=dtype)
    array.setflags(write=False)
    return array


def read_constant_type(attr: AttributeProto) -> tuple[int, Dims]:
    """(dtype, shape) of a Constant node, without decoding the value that this attribute holds."""
    if attr.name == "value":
        return attr.t.data_type, tuple(attr.t.dims)
    if attr.name == "sparse_value":
        return attr.sparse_tensor.values.data_type, tuple(attr.sparse_tensor.dims)
    return _CONSTANT_DTYPES[attr.name], np.shape(onnx.helper.get_attribute_value(attr))


def read_declared_type(value: ValueInfoProto) -> tuple[int, Dims | None]:
    """(dtype, shape) a ValueInfoProto declares; dtype 0 unless it is a dense tensor, shape None when unknown."""
    if value.type.WhichOneof("value") != "tensor_type":
        return 0, None
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple(
        # Exporters write -1 for unknown dims, which the checker lets pass, and Paddle "?" for every
        # one: not one symbol that makes them equal.
        (dim.dim_value if dim.dim_value >= 0 else None)
        if dim.HasField("dim_value")
        else (None if dim.dim_param in ("", "?") else dim.dim_param)
        for dim in tensor.shape.dim
    )


def name_type(number: int) -> str:
    """The name of a type of `TensorProto`, in lower case; "type99" for one that this onnx does not know."""
    return next((name for name, known in TENSOR_TYPES.items() if known == number), f"type{number}")


def _decode_text(raw: bytes) -> str | bytes:
    # ONNX asks for UTF-8, but custom operators keep binary data in strings.
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def decode_attribute(attr: AttributeProto) -> Any:
    """int, float, str, tuple of these, or array; other kinds (types, sparse tensors) as their protobuf message."""
    value = onnx.helper.get_attribute_value(attr)
    if attr.type == AttributeProto.TENSOR:
        return decode_tensor(attr.t)
    if attr.type == AttributeProto.STRING:
        return _decode_text(attr.s)
    if attr.type == AttributeProto.STRINGS:
        return tuple(map(_decode_text, attr.strings))
    if attr.type == AttributeProto.TENSORS:
        return tuple(map(decode_tensor, attr.tensors))
    return tuple(value) if isinstance(value, list) else value


class Attributes(Mapping[str, Any]):
    """A node's attributes, decoded when asked for; subgraphs and references to a function's attributes are left out."""

    def __init__(self, node: NodeProto) -> None:
        self._raw = {
            attr.name: attr
            for attr in node.attribute
            if attr.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
            and not attr.ref_attr_name
        }
        # Most attributes are never asked for, and some hold large tensors.
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = decode_attribute(self._raw[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)
