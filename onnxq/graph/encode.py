"""Arrays into TensorProtos, sub-byte types packed here because graphsurgeon cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.graph.held import put
from onnxq.graph.weights import BITS


def encode_tensor(name: str, array: NDArray[Any], dtype: int | None = None, *, hold: bool = False) -> TensorProto:
    """A TensorProto named `name`. dtype: an onnx.TensorProto type, by default the array's own.

    hold: inside `holding()`, a stub of a large array, which then must not change; for the main graph only.

    Sub-byte integers are given as ordinary integers and packed little end first (the ONNX spec of raw_data). Raises
    ModelError when a value does not fit the type.
    """
    array = np.asarray(array)
    if dtype is None:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=dtype, dims=array.shape)
    if dtype == TensorProto.STRING:
        tensor.string_data.extend(text if isinstance(text, bytes) else str(text).encode() for text in array.ravel())
        return tensor
    target = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    stored = array if array.dtype == target else _cast(name, array, target)
    if hold and put(tensor, stored):
        return tensor
    if dtype in BITS:
        tensor.raw_data = _pack(stored, BITS[dtype])
    else:
        tensor.raw_data = np.ascontiguousarray(stored, dtype=target.newbyteorder("<")).tobytes()
    return tensor


def _cast(name: str, array: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    stored = array.astype(target)
    if not np.array_equal(stored.astype(array.dtype), array, equal_nan=array.dtype.kind == "f"):
        raise ModelError(name, f"its values do not fit {target.name}", "saturate or round them first", code="Q117")
    return stored


def _pack(array: NDArray[Any], bits: int) -> bytes:
    per_byte, mask = 8 // bits, (1 << bits) - 1
    # ml_dtypes' sub-byte types take a byte each in memory; the low bits are the value.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & mask
    padded = np.zeros((flat.size + per_byte - 1) // per_byte * per_byte, dtype=np.uint8)
    padded[: flat.size] = flat
    packed = np.zeros(padded.size // per_byte, dtype=np.uint8)
    for k in range(per_byte):
        packed |= padded[k::per_byte] << (bits * k)
    return packed.tobytes()
