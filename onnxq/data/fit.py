"""Validation of arrays against a model's inputs: name, rank, fixed dims, kind of dtype, finite values."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from onnxq.arrays import Array, Arrays, InputShapes
from onnxq.errors import DataError, suggest_names
from onnxq.graph import ValueInfo
from onnxq.sites import Names

# By input name: arrays of any number of samples, and those of one run.
Feeds = dict[str, Array]
Inputs = Sequence[ValueInfo]
DType = np.dtype[Any]

_RIGHT_SHAPE = "give it the shape the model declares"
_KINDS = {"i": "int", "u": "int", "b": "bool", "U": "string", "S": "string", "O": "string"}


def find_input_dtype(value: ValueInfo) -> DType | None:
    """Return the numpy dtype of an input (object for strings); None if the model does not declare one."""
    if value.dtype == 0:
        return None
    return np.dtype(helper.tensor_dtype_to_np_dtype(value.dtype))


def classify_input(value: ValueInfo) -> str:
    """The kind of an input's dtype, as of `classify_dtype`; "" if the model does not declare one."""
    dtype = find_input_dtype(value)
    return "" if dtype is None else classify_dtype(dtype)


def is_integer(value: ValueInfo) -> bool:
    """True for an input of integers."""
    return classify_input(value) == "int"


def classify_dtype(dtype: DType) -> str:
    """Return "float", "int", "bool", "string" or the dtype's own name."""
    # ml_dtypes' bfloat16 and float8 have numpy's kind "V" (void), and their names are all that tells.
    if dtype.kind == "f" or dtype.name.startswith(("bfloat", "float")):
        return "float"
    return _KINDS.get(dtype.kind, dtype.name)


def format_shape(value: ValueInfo) -> str:
    """Format a declared shape: [N, 3, 224, ?]."""
    if value.shape is None:
        return "of any shape"
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in value.shape) + "]"


def match_inputs(inputs: Inputs, arrays: Arrays, where: str) -> tuple[Feeds, Names]:
    """Return the arrays in the order of the model's inputs, and the names of arrays that are no inputs.

    A model with one input accepts a single array without a name, which numpy calls arr_0.
    Raises DataError for an input without an array, with the nearest name arrays.
    """
    names = [value.name for value in inputs]
    if len(names) == 1 and names[0] not in arrays and [*arrays] in ([""], ["arr_0"]):
        return {names[0]: next(iter(arrays.values()))}, ()
    extra = tuple(name for name in arrays if name not in names)
    for name in names:
        if name not in arrays:
            has = f" (it has {_join_names(arrays)})" if arrays else ""
            near = f"{suggest_names(name, extra)} Name" if extra else "name"
            fix = f"{near} the arrays after the inputs: {_join_names(names)}"
            raise DataError(
                where, f"has no array for the model's input {name!r}{has}", fix, code="Q207"
            )
    return {name: arrays[name] for name in names}, extra


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def check_dtype(array_dtype: DType, value: ValueInfo, where: str) -> str:
    """Raise DataError unless the dtype converts to the input's within its kind.

    Returns a note on the conversion; "" if none is needed.
    """
    want = find_input_dtype(value)
    if want is None or array_dtype == want:
        return ""
    kind = classify_dtype(want)
    if classify_dtype(array_dtype) != kind:
        name = "string" if want.kind == "O" else want.name
        fix = (
            f"convert it first, e.g. {value.name}.astype({name!r}), if that is what its values mean"
        )
        raise make_input_error(
            where, value, f"is {array_dtype}, the model wants {name}", fix, code="Q210"
        )
    return "" if kind == "string" else f"input {value.name}: {array_dtype} converted to {want}"


def check_dims(
    shape: Sequence[int], value: ValueInfo, where: str, *, skip: int = 0, offset: int = 0
) -> None:
    """Raise DataError unless `shape`, from axis `offset` on, has the input's fixed dims. skip: axes to ignore."""
    if value.shape is None:
        return
    for axis, want in enumerate(value.shape):
        got = shape[axis + offset]
        if axis >= skip and isinstance(want, int) and got != want:
            place = f"axis {axis + offset} of its shape {list(shape)}"
            cause = f"{place} is {got}, the model wants {want} in {format_shape(value)}"
            raise make_input_error(where, value, cause, _suggest_layout(shape[offset:], value))


def _suggest_layout(shape: Sequence[int], value: ValueInfo) -> str:
    """Suggest a transpose for NHWC in place of NCHW or the reverse, the most common mistake."""
    dims = value.dims
    for name, order in (("NHWC", (0, 3, 1, 2)), ("NCHW", (0, 2, 3, 1))) if len(dims) == 4 else ():
        sizes = ((shape[axis], dims[k]) for k, axis in enumerate(order) if k)
        fits = [got == want for got, want in sizes if isinstance(want, int)]
        if fits and all(fits):
            return f"it looks like {name}: transpose it with .transpose{order}"
    return _RIGHT_SHAPE


def make_rank_error(shape: Sequence[int], value: ValueInfo, where: str) -> DataError:
    """Make the error for a shape that is neither one input nor a stack of them."""
    rank = value.rank
    near = "add the batch axis, e.g. array[None]" if len(shape) == rank - 1 else _RIGHT_SHAPE
    wants = f"the model wants {rank}, {format_shape(value)}, or {rank + 1} with one sample per leading index"
    return make_input_error(
        where, value, f"its shape {list(shape)} has {len(shape)} dimensions; {wants}", near
    )


def make_input_error(
    where: str, value: ValueInfo, cause: str, fix: str, *, code: str = "Q209"
) -> DataError:
    """Make the error for an input's array in a file or item; `code` says which, by default a wrong shape."""
    return DataError(f"{where}, input {value.name!r}", cause, fix, code=code)


def fit_array(array: Array, value: ValueInfo, where: str) -> Array:
    """Convert one sample's array to the input's dtype, contiguous and aligned.

    Raises DataError if a fixed dim differs, a value does not fit the dtype, or there is NaN or +inf; -inf is a mask's.
    """
    if value.shape is not None and array.ndim != len(value.shape):
        raise make_rank_error(array.shape, value, where)
    check_dims(array.shape, value, where)
    check_dtype(array.dtype, value, where)
    want = find_input_dtype(value) or array.dtype
    kind = classify_dtype(want)
    if kind == "float":
        _check_finite(array, value, where)
    if want == array.dtype:
        # Arrays mapped from inside a zip archive may start anywhere; ascontiguousarray would make a scalar [1].
        return np.require(array, requirements=("C", "A", "E"))
    if kind == "int" and array.size:
        # A value that does not fit would wrap around silently.
        limits = np.iinfo(want)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise make_input_error(
                where, value, f"holds values that {want} cannot", "check the data", code="Q210"
            )
    with np.errstate(over="ignore"):
        out = np.array(array, dtype=want, order="C")
    if kind == "float" and np.isinf(out).sum() != np.isinf(array).sum():
        raise make_input_error(
            where, value, f"holds values too large for {want}", "scale the data", code="Q210"
        )
    return out


def _check_finite(array: Array, value: ValueInfo, where: str) -> None:
    # NaN compares false, as inf does; -inf passes.
    bad = ~(np.asarray(array) < np.inf)
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        kinds = "NaN" if np.isnan(array).any() else "inf"
        cause = f"holds {kinds} ({int(bad.sum())} of {array.size} values, the first at {place})"
        raise make_input_error(
            where, value, cause, "remove the sample or mend how it was made", code="Q211"
        )


def refuse_empty(where: str | Path) -> DataError:
    """The error of data without samples."""
    cause = "is empty: it has no samples"
    return DataError(where, cause, "give it at least one sample", code="Q203")


def get_length(value: ValueInfo, inputs: Inputs, shapes: InputShapes) -> int:
    """The longest axis of open size behind the batch, which an input of lengths tells; 0 for other inputs."""
    if not is_integer(value) or value.rank > 1 or "len" not in value.name.lower():
        return 0
    opened = (
        size
        for other in inputs
        for dim, size in zip(other.dims[1:], shapes[other.name][1:], strict=False)
        if not isinstance(dim, int)
    )
    return max(opened, default=0)
