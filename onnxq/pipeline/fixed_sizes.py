"""Sizes of inputs that a file fixes, for engines that compile a graph for them: those of `fix`, or of the samples."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnx import TensorProto

from onnxq.arrays import InputShapes
from onnxq.backends import find_target
from onnxq.config import Config
from onnxq.data import Dataset, load_data
from onnxq.data.sources import fits_whole
from onnxq.errors import ConfigError, suggest_names
from onnxq.graph import ModelSource, ValueInfo, get_index, load_model, name_nodes
from onnxq.graph.precision.widen import NARROW
from onnxq.progress import Progress, count_items

# Of each axis its size or its symbol.
NamedSizes = tuple[int | str, ...]
NamedShapes = dict[str, NamedSizes]
# A size of an input that has no symbol.
_UNNAMED = "?"
_SIZE = r"[1-9]\d*"


def settle_sizes(
    model: ModelSource, data: object, config: Config, progress: Progress
) -> tuple[object, InputShapes]:
    """The samples, and the shape of every input of which a size is to be fixed; axes that stay free have 0.

    Sizes are those of `config.fix`, by symbol or by input; a target that takes whole graphs needs all, and has the
    others from the samples. Raises ConfigError where these differ or there are none.
    """
    whole = find_target(config.target).whole
    light = name_nodes(load_model(model, lazy=True).light)
    inputs = get_index(light).inputs
    shapes = _read_fixes(config, inputs)
    if whole and data is not None and not all(map(_is_fixed, shapes.values())):
        # Samples are whole batches where the size of these is fixed.
        fitted = (
            replace(value, shape=shapes[value.name] if value.shape else value.shape)
            for value in inputs
        )
        # The model is prepared to compute float16 in float32.
        typed = tuple(
            replace(value, dtype=int(TensorProto.FLOAT)) if value.dtype in NARROW else value
            for value in fitted
        )
        data = load_data(data, typed, config.data, light, progress=progress)
        shapes = _add_sample_sizes(shapes, data, progress)
    for name, shape in shapes.items() if whole else ():
        if not _is_fixed(shape):
            cause = (
                f"{name} is {'x'.join(map(str, shape))}, and "
                f"{config.target} compiles a graph for sizes that are fixed"
            )
            raise ConfigError("fix", cause, _suggest_fix(name, shape), code="Q315")
    before = _read_shapes(inputs)
    return data, {
        name: tuple(dim if isinstance(dim, int) else 0 for dim in shape)
        for name, shape in shapes.items()
        if shape != before[name]
    }


def _read_shapes(inputs: Iterable[ValueInfo]) -> NamedShapes:
    return {
        value.name: tuple(_UNNAMED if dim is None else dim for dim in value.dims)
        for value in inputs
    }


def _read_fixes(config: Config, inputs: Iterable[ValueInfo]) -> NamedShapes:
    """The shape of every input, with the sizes that the configuration fixes."""
    shapes = _read_shapes(inputs)
    for text in config.fix:
        name, _, sizes = text.rpartition("=")
        if name in shapes and re.fullmatch(rf"{_SIZE}(x{_SIZE})*", sizes):
            fixed = tuple(map(int, sizes.split("x")))
            value = next(value for value in inputs if value.name == name)
            if not fits_whole(fixed, value):
                have = "x".join(map(str, shapes[name]))
                raise ConfigError(
                    config.where("fix"),
                    f"{sizes} does not fit {name}, {have}",
                    "give a size for each axis",
                    code="Q315",
                )
            known = dict(zip(shapes[name], fixed, strict=True))
            shapes[name] = fixed
        elif re.fullmatch(_SIZE, sizes) and any(name in shape for shape in shapes.values()):
            known = {name: int(sizes)}
        else:
            symbols = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}
            cause = f"{text!r} names no input and no size of one, or gives no size"
            fix = (
                f"write NAME=SIZE or INPUT=1x3x224x224; {suggest_names(name, {*shapes, *symbols})}"
            )
            raise ConfigError(config.where("fix"), cause, fix, code="Q315")
        # Sizes without a symbol share only this mark.
        known.pop(_UNNAMED, None)
        shapes = {key: tuple(known.get(dim, dim) for dim in shape) for key, shape in shapes.items()}
    return shapes


def _is_fixed(shape: NamedSizes) -> bool:
    return all(isinstance(dim, int) for dim in shape)


def _add_sample_sizes(
    shapes: Mapping[str, NamedSizes], data: Dataset, progress: Progress
) -> NamedShapes:
    """The shapes with the sizes that all samples share in place of symbols."""
    # By input and axis. An optional input, or one of unknown rank, has no axes to be fixed.
    sizes: dict[tuple[str, int], set[int]] = {}
    with progress("looking at the sizes of samples", len(data)) as task:
        for feeds in count_items(data.samples(), task):
            for name in shapes:
                for axis, size in enumerate(feeds[name].shape):
                    sizes.setdefault((name, axis), set()).add(int(size))
    alike = {place: min(known) for place, known in sizes.items() if len(known) == 1}
    return {
        name: tuple(
            alike.get((name, axis), dim) if isinstance(dim, str) else dim
            for axis, dim in enumerate(shape)
        )
        for name, shape in shapes.items()
    }


def _suggest_fix(name: str, shape: NamedSizes) -> str:
    symbols = [dim for dim in shape if isinstance(dim, str) and dim.isidentifier()]
    if len(symbols) == sum(isinstance(dim, str) for dim in shape):
        return f"give {' and '.join(f'`fix={symbol}=…`' for symbol in symbols)}, and samples of that size"
    sizes = "x".join("…" if isinstance(dim, str) else str(dim) for dim in shape)
    return f"give `fix={name}={sizes}`, and samples of that size"
