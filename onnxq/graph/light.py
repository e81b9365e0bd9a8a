"""Weights kept in memory beside the models that use them, while those are copied, edited and run by the dozen.

Inside `holding()` a large initializer of the main graph may be a stub: name, type and dims, and in place of its bytes
the number of an array that is held here once. Copies, edits, serialization and ORT sessions then cost what the graph
costs. `hold` makes stubs of a model's initializers, `filled` gives the bytes back; whatever leaves a `holding()` block
or is handed to somebody else must be filled. Stubs count as external data, which every tool here leaves aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError

_LOCATION = "onnxq/held"
# Smaller ones cost nothing, and tools look at their values.
_WORTH = 1 << 14
# Types whose arrays lie in memory as raw_data does, in numpy and in ORT.
_PLAIN = frozenset(
    {
        TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.UINT8,
        TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32, TensorProto.INT64,
    }
)  # fmt: skip


@dataclass(eq=False)
class _Block:
    """What one block holds, and what is remembered of models until the outermost one ends."""

    own: list[int]
    memo: dict[str, dict[Any, Any]]


_arrays: dict[int, NDArray[Any]] = {}
_numbers = count(1)
_open: ContextVar[_Block | None] = ContextVar("onnxq_held", default=None)


@contextmanager
def holding() -> Iterator[None]:
    """Hold the weights of the models made inside the block; blocks nest, and each lets go of its own at the end."""
    outer = _open.get()
    block = _Block([], {} if outer is None else outer.memo)
    token = _open.set(block)
    try:
        yield
    finally:
        _open.reset(token)
        for number in block.own:
            del _arrays[number]


def remembered(kind: str) -> dict[Any, Any] | None:
    """Where to keep what is known of models while a block lasts, by kind of knowledge; None outside.

    Inside, a model that is handed on is changed no more, so what was found out about it stays true.
    """
    block = _open.get()
    return None if block is None else block.memo.setdefault(kind, {})


def is_held(tensor: TensorProto) -> bool:
    """True for a stub whose values are held here."""
    return tensor.data_location == TensorProto.EXTERNAL and any(e.value == _LOCATION for e in tensor.external_data)


def held_array(tensor: TensorProto) -> NDArray[Any]:
    """The read-only values of a stub. Raises ModelError when the block that held them has ended."""
    found = _arrays.get(int(next((e.value for e in tensor.external_data if e.key == "offset"), "0")))
    if found is None:
        raise ModelError(tensor.name, "its values are no longer held", "this is a defect of onnxq; please report it")
    return found


def put(tensor: TensorProto, array: NDArray[Any]) -> bool:
    """Make a tensor without values a stub of `array`, which must not change; False where that is not worth while.

    tensor: with data_type and dims. Holds nothing outside `holding()`.
    """
    block = _open.get()
    if block is None or array.nbytes < _WORTH or tensor.data_type not in _PLAIN:
        return False
    value = np.ascontiguousarray(array).view()
    value.setflags(write=False)
    number = next(_numbers)
    _arrays[number] = value
    block.own.append(number)
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", _LOCATION), ("offset", str(number))):
        tensor.external_data.add(key=key, value=text)
    return True


def hold(proto: ModelProto) -> ModelProto:
    """The model with stubs for its large initializers; itself outside `holding()`. Its own tensors stay as they are."""
    from onnxq.graph.weights import copy_fields

    worth = [k for k, tensor in enumerate(proto.graph.initializer) if _can_be_held(tensor)]
    if _open.get() is None or not worth:
        return proto
    light, chosen = ModelProto(), set(worth)
    copy_fields(proto, light, ("graph",))
    copy_fields(proto.graph, light.graph, ("initializer",))
    for k, tensor in enumerate(proto.graph.initializer):
        target = light.graph.initializer.add()
        if k not in chosen:
            target.CopyFrom(tensor)
            continue
        copy_fields(tensor, target, ("raw_data",))
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
        array = np.frombuffer(tensor.raw_data, kind).astype(kind.newbyteorder("="), copy=False)
        put(target, array.reshape(tensor.dims))
    return light


def _can_be_held(tensor: TensorProto) -> bool:
    if tensor.data_type not in _PLAIN:
        return False
    if tensor.HasField("data_location") or not tensor.HasField("raw_data"):
        return False
    size = int(np.prod(tensor.dims, dtype=np.int64))
    return size * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize >= _WORTH


def held_initializers(proto: ModelProto) -> dict[str, NDArray[Any]]:
    """The arrays behind the stubs of the main graph, by name."""
    return {tensor.name: held_array(tensor) for tensor in proto.graph.initializer if is_held(tensor)}


def filled(proto: ModelProto) -> ModelProto:
    """The model with the bytes of every stub in it; itself when it has none."""
    if not any(is_held(tensor) for tensor in proto.graph.initializer):
        return proto
    whole = ModelProto()
    whole.CopyFrom(proto)
    for tensor in whole.graph.initializer:
        if is_held(tensor):
            array = held_array(tensor)
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.raw_data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return whole
