"""The sizes an engine is built for: (min, opt, max) of every input, given, guessed, or taken from samples."""

import re
from collections.abc import Iterable, Sequence
from functools import partial

from onnxq.arrays import Arrays, InputShapes, Shape, map_shapes
from onnxq.backends.engine import Profile
from onnxq.data.sources import fits_whole
from onnxq.data.synthetic import make_synthetic
from onnxq.errors import ConfigError, DataError, OnnxqError, suggest_names
from onnxq.graph import GraphIndex, ModelLike, ValueInfo
from onnxq.sites import Caution, Cautions, Names
from onnxq.wording import format_shape

# (min, opt, max) by the names of inputs.
SizeProfile = dict[str, tuple[Shape, ...]]

_fault = partial(ConfigError, code="Q315")
_FORM = "write it as input:1x3x224x224 or input:MIN,OPT,MAX with sizes joined by x"


def parse_shapes(texts: Iterable[str]) -> SizeProfile:
    """`name:1x3x32x32` or `name:1x3x32x32,4x3x32x32,8x3x32x32` -> (min, opt, max). Raises ConfigError."""
    found = {}
    for text in texts:
        # From the right: exporters put colons into names, like "serving_default:0".
        name, _, sizes = text.rpartition(":")
        parts = [part.strip() for part in sizes.split(",")]
        if (
            not name
            or len(parts) not in (1, 3)
            or not all(re.fullmatch(r"\d+(x\d+)*", part) for part in parts)
        ):
            raise _fault(f"shapes: {text}", "is not an input with its sizes", _FORM)
        shapes = tuple(tuple(map(int, part.split("x"))) for part in parts)
        found[name] = shapes if len(parts) == 3 else shapes * 3
    return found


def is_dynamic(value: ValueInfo) -> bool:
    """True when some axis of the input has no fixed size."""
    return value.shape is None or any(not isinstance(dim, int) for dim in value.shape)


def demand_sizes(index: GraphIndex, given: Profile, engine: str) -> None:
    """Raise ConfigError, naming the sizes, for inputs of no fixed size without one size given. engine: its title."""
    for value in index.inputs:
        sizes = given.get(value.name, ())
        if not is_dynamic(value) or len(set(sizes)) == 1:
            continue
        have = format_shape(value.dims) or "no shape"
        cause = f"{engine} compiles for one size alone, and this input has {'several' if sizes else have}"
        fix = f"fix the sizes in the file (`onnxq quantize` with `fix=…`), or give `shapes='{value.name}:1x…'`"
        raise _fault(f"input {value.name}", cause, fix)


def make_profile(index: GraphIndex, given: Profile) -> tuple[SizeProfile, Names]:
    """(min, opt, max) of every dynamic input, and the names of those that were guessed.

    Raises ConfigError for an unknown input, sizes that do not fit its shape, or when no guess fits the model.
    """
    inputs = {value.name: value for value in index.inputs}
    found = {}
    for name, sizes in given.items():
        if name not in inputs:
            raise _fault(
                f"shapes: {name}", "the model has no such input", suggest_names(name, inputs)
            )
        found[name] = _check_sizes(inputs[name], sizes)
    missing = tuple(
        value.name for value in inputs.values() if is_dynamic(value) and value.name not in found
    )
    if missing:
        guessed = _guess_sizes(
            index.model, tuple(inputs.values()), {name: sizes[1] for name, sizes in found.items()}
        )
        found |= {name: (guessed[name],) * 3 for name in missing}
    # Sizes of an input that has one are only checked: engines refuse a profile for it.
    return {name: sizes for name, sizes in found.items() if is_dynamic(inputs[name])}, missing


def warn_guesses(profile: Profile, guessed: Names, done: str) -> Cautions:
    """The warning of inputs whose size was guessed, if there are any. done: "built for", as they were."""
    if not guessed:
        return ()
    listed = ", ".join(f"{name} {format_shape(profile[name][1])}" for name in guessed)
    text = f"inputs of no fixed size were {done} one size: {listed}; `shapes=…` gives others"
    return (Caution("W112", text),)


def _check_sizes(value: ValueInfo, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    for shape in shapes:
        if not fits_whole(shape, value):
            given = "x".join(map(str, shape))
            cause = f"{given} does not fit its shape {format_shape(value.dims)}"
            raise _fault(f"shapes: {value.name}", cause)
    if len(shapes) != 3 or not all(a <= b <= c for a, b, c in zip(*shapes, strict=True)):
        raise _fault(
            f"shapes: {value.name}",
            "its three shapes are not min, opt, max in growing order",
            _FORM,
        )
    return shapes


def _guess_sizes(
    proto: ModelLike, inputs: Sequence[ValueInfo], known: InputShapes
) -> dict[str, Shape]:
    """Sizes the model runs with; those that names and ranks suggest where ONNX Runtime cannot tell."""
    dims = {}
    for value in inputs:
        for axis, size in enumerate(known.get(value.name, ())):
            dim = None if value.shape is None else value.shape[axis]
            if not isinstance(dim, int):
                dims[dim or f"{value.name}:{axis}"] = size
    try:
        # Sizes that the model runs with are looked for first; it may hold operators that ONNX Runtime lacks.
        try:
            sample = make_synthetic(inputs, samples=1, dims=dims, model=proto)[0]
        except OnnxqError:
            sample = make_synthetic(inputs, samples=1, dims=dims)[0]
    except DataError as error:
        cause = f"no size can be guessed for it: {error.cause}"
        raise _fault(error.subject, cause, "give `shapes=…`") from error
    return map_shapes(sample)


def list_shapes(index: GraphIndex, samples: Iterable[Arrays]) -> SizeProfile:
    """(least, first, largest) size of every axis of every input over the samples."""
    found: SizeProfile = {}
    for feeds in samples:
        for name in (value.name for value in index.inputs):
            shape = feeds[name].shape
            low, first, high = found.get(name, (shape, shape, shape))
            found[name] = (tuple(map(min, low, shape)), first, tuple(map(max, high, shape)))
    return found
