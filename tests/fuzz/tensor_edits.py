"""Damage to one TensorProto."""

from random import Random

import numpy as np
from onnx import TensorProto, numpy_helper

# Where integers, dims and floats have their limits.
INTS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 100, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
DIMS = (-1, 0, 1, 2, 3, 5, 8, 2**31, 2**62)
FLOATS = (0.0, -1.0, 1e-45, 1e-20, 1e38, -1e38, float("inf"), float("-inf"), float("nan"), 1e-7, 300.0)


def damage_tensor(rng: Random, tensor: TensorProto) -> None:
    """Change type, dims, bytes or values, fitting together or not."""
    kind = rng.randrange(8)
    if kind == 0:
        tensor.data_type = rng.randrange(30)
    elif kind == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(DIMS)
    elif kind == 2:
        tensor.dims.append(rng.choice(DIMS)) if rng.random() < 0.5 or not tensor.dims else tensor.dims.pop()
    elif kind == 3:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 4:
        field = rng.choice(("float_data", "int64_data", "int32_data", "double_data", "string_data"))
        getattr(tensor, field).extend([b"a"] if field == "string_data" else [1])
    elif kind == 5:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(
            key=rng.choice(("location", "offset", "")), value=rng.choice(("", "model.onnx", "/etc/passwd"))
        )
    else:
        change_values(rng, tensor)


def change_values(rng: Random, tensor: TensorProto) -> None:
    """Change values, and shape or type with them, so that the tensor is whole."""
    try:
        array = np.array(numpy_helper.to_array(tensor))
    except Exception:
        return
    name = tensor.name
    if array.dtype.kind == "f" and array.size:
        with np.errstate(all="ignore"):
            kind = rng.randrange(6)
            if kind == 0:
                array.flat[rng.randrange(array.size)] = rng.choice(FLOATS)
            elif kind == 1:
                array[...] = rng.choice(FLOATS)
            elif kind == 2:
                array = array * np.asarray(rng.choice((1e30, 1e-30, 1e-40, -1.0, 0.0)), array.dtype)
            elif kind == 3:
                array = array.astype(rng.choice((np.float16, np.float64, np.int8, np.int64)))
            elif kind == 4:
                array = array.reshape(-1) if rng.random() < 0.5 else array[None]
            else:
                array = array[: rng.randrange(len(array) + 1)] if array.ndim else array
    elif array.dtype.kind in "iu" and array.size:
        array.flat[rng.randrange(array.size)] = rng.choice(
            [one for one in INTS if abs(one) <= np.iinfo(array.dtype).max]
        )
    tensor.CopyFrom(numpy_helper.from_array(array, name))
