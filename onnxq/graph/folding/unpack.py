"""Weights moved or widened without an engine: ORT would copy them five times for it.

It also serves types that ORT cannot hand back to numpy (bfloat16, float8, sub-byte integers).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.graph.base import NodeRef

# Casts in which no value changes: source type -> target types.
_WIDER: dict[int, tuple[int, ...]] = {
    TensorProto.FLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.BFLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.FLOAT: (TensorProto.DOUBLE,),
}
_RESHAPES = frozenset(["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"])


def move_constant(
    node: NodeRef, source: NDArray[Any], dtype: int, shape: tuple[int, ...] | None
) -> NDArray[Any] | None:
    """Return the output of `node` for a constant first input; None unless it only moves or widens values.

    dtype: of the source. shape: of the output where inferred, None otherwise.
    """
    if node.op_type in _RESHAPES and shape is not None and np.prod(shape, dtype=np.int64) == source.size:
        return source.reshape(shape)
    if node.op_type == "Transpose":
        perm = node.attrs.get("perm", tuple(range(source.ndim))[::-1])
        # Another rank than the model declares: the engine says which node it is.
        fits = sorted(perm) == list(range(source.ndim))
        return np.ascontiguousarray(np.transpose(source, perm)) if fits else None
    if node.op_type == "Cast" and node.attrs.get("to") in _WIDER.get(dtype, ()):
        return source.astype(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
    return None
