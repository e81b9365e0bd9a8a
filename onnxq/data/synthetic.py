"""Random inputs that fit a model, for use without data: for trials only, never for real ranges."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from onnx import TensorProto

from onnxq.arrays import Array, Arrays, InputShapes, are_finite
from onnxq.data.dataset import Dataset
from onnxq.data.fit import Feeds, Inputs, classify_input, find_input_dtype, format_shape, get_length
from onnxq.data.sources import SampleSource
from onnxq.errors import DataError, ModelError
from onnxq.graph import GraphIndex, ModelLike, ValueInfo, get_index, infer_shapes, walk_from
from onnxq.runtime import Session
from onnxq.sites import Lines, MaybeTensor, NameSet, TensorId

# Augmented samples: images inverted, mirrored, rotated, or with one quarter enlarged.
# They replace images that calibration lacks. A late layer has few positions per image: 24 images give 1176 of them to
# a layer of 1152 columns. Rounding by second moments then moves its errors into directions that these images do not
# excite and others do. EfficientNet-Lite0 with all weights at 4 bits, on scenes outside the calibration set: with its
# last 1152 columns alone quantized, 36 dB on the images used and 19 dB on others; the whole network 8.2 dB without
# augmentation, 8.8 dB with five augmented samples per image (means of three sets of scenes).

Axes = tuple[int, int]
Transform = Callable[[Array, Axes], Array]

# Sizes that tell the channel axis of an image from its height and width.
CHANNELS = (1, 3, 4)
# Elements of all other inputs together: sizes and thresholds have fewer.
_BESIDE = 16
# Pixels per side; a quarter of a smaller image shows nothing.
_SMALLEST = 16


def augment_sample(feeds: Arrays) -> tuple[Feeds, ...]:
    """Make augmented samples of the same shapes, types and value range; () for a sample without images.

    An image is an input [N, C, H, W] or [N, H, W, C] of 1, 3 or 4 channels and at least 16 x 16 pixels. Other inputs
    are kept. If they hold more than a size or a threshold, there is no augmentation: the network then reads more than
    images, and an input of that shape may be an attention mask or a cache.
    """
    spatial = {
        name: axes
        for name, value in feeds.items()
        if (axes := _find_spatial_axes(np.asarray(value))) is not None
    }
    beside = sum(np.asarray(value).size for name, value in feeds.items() if name not in spatial)
    if not spatial or beside > _BESIDE:
        return ()
    augmented = []
    for transforms in _TRANSFORMS:
        sample = dict(feeds)
        for name, axes in spatial.items():
            value = np.asarray(sample[name])
            for transform in transforms:
                value = transform(value, axes)
            # Flips and rotations are views with negative strides.
            sample[name] = np.ascontiguousarray(value)
        augmented.append(sample)
    return tuple(augmented)


def _find_spatial_axes(value: Array) -> Axes | None:
    """Find the axes of height and width; None if the array is no image."""
    if not (value.ndim == 4 and value.dtype.kind in "fiu" and value.size and are_finite(value)):
        return None
    for channel, axes in ((1, (2, 3)), (3, (1, 2))):
        if value.shape[channel] in CHANNELS and min(value.shape[k] for k in axes) >= _SMALLEST:
            return axes
    return None


def _invert_values(value: Array, axes: Axes) -> Array:
    # Mirrored inside the image's own values, so that ranges stay as they are.
    low, high = (end(value, axis=axes, keepdims=True) for end in (np.min, np.max))
    return np.asarray(high - (value - low), value.dtype)


def _turn_image(value: Array, axes: Axes) -> Array:
    """Rotate by 90 degrees; by 180 if the image is not square, to keep its shape."""
    square = value.shape[axes[0]] == value.shape[axes[1]]
    return np.rot90(value, 1 if square else 2, axes)


def _make_quarter(down: float, right: float) -> Transform:
    """Make the transform that enlarges a quarter of the image to full size, every pixel twice in both directions.

    down, right: position of the quarter, from 0 to 1.
    """

    def enlarge(value: Array, axes: Axes) -> Array:
        for axis, far in zip(axes, (down, right), strict=True):
            size = value.shape[axis]
            first = round(far * (size - (size + 1) // 2))
            value = np.take(value, first + np.arange(size) // 2, axis=axis)
        return value

    return enlarge


# Each is applied in order. Often there is time for the first three only.
_TRANSFORMS = (
    (_invert_values,),
    (_make_quarter(0, 1), _turn_image),
    (_make_quarter(1, 0), lambda value, axes: np.flip(value, axes[1])),
    (_make_quarter(0, 0),),
    (_make_quarter(0.5, 0.5), _invert_values),
)


_INTS = (TensorProto.INT32, TensorProto.INT64)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class DecoderInputs:
    """Axes are named as `name_axis` names them.

    past: those of the tokens in the caches. new: that of the tokens, or how many there are. whole: axes of both
    together. positions: inputs that count the tokens. switches: booleans that say whether caches are read; an If
    decoder has one branch for each.
    """

    past: NameSet
    new: str | int
    whole: NameSet
    positions: NameSet
    switches: NameSet


def name_axis(value: ValueInfo, axis: int) -> str:
    """The symbol of an axis of no fixed size, or "input:axis" where it has none."""
    dim = value.dims[axis]
    return dim if isinstance(dim, str) else f"{value.name}:{axis}"


def find_decoder(inputs: Inputs) -> DecoderInputs | None:
    """The inputs of a decoder with caches of any length; None for other models."""
    past = frozenset(axis for value in inputs if (axis := _find_past(value)) is not None)
    ids = next(
        (v for v in inputs if _has_tokens(v) and not _is_called(v, "mask", "position", "past")),
        None,
    )
    if not past or ids is None:
        return None
    length = ids.dims[1]
    new = length if isinstance(length, int) else name_axis(ids, 1)
    masks = [
        v
        for v in inputs
        if _has_tokens(v) and _is_called(v, "mask") and not isinstance(v.dims[1], int)
    ]
    # Exporters write "total_sequence_length", "past_sequence_length + 1", "past + sequence", or a symbol of its own.
    whole = {
        key
        for value in masks
        if (key := name_axis(value, 1)) != new and "encoder" not in key.lower()
    }
    positions = {
        value.name for value in inputs if _has_tokens(value) and _is_called(value, "position")
    }
    switches = {
        value.name
        for value in inputs
        if value.dtype == TensorProto.BOOL and _is_called(value, "cache")
    }
    return DecoderInputs(past, new, frozenset(whole), frozenset(positions), frozenset(switches))


def _is_called(value: ValueInfo, *parts: str) -> bool:
    return any(part in value.name.lower() for part in parts)


def _has_tokens(value: ValueInfo) -> bool:
    """True for integers [batch, tokens]."""
    return value.dtype in _INTS and value.rank == 2


def _find_past(value: ValueInfo) -> str | None:
    """The axis of the tokens in a cache: of [batch, heads, tokens, size], or with both parts in front."""
    shape = value.dims
    if not (value.dtype in _FLOATS and len(shape) in (4, 5) and _is_called(value, "past", "cache")):
        return None
    key = name_axis(value, len(shape) - 2)
    # What an encoder said is read as well, and never grows.
    return None if isinstance(shape[-2], int) or "encoder" in f"{value.name} {key}".lower() else key


_FIX = "give `data=…`, or quantize weights alone (`mode: weight-only`), which needs none"
# Number of samples if none is requested.
SAMPLES = 16
# Sizes of dynamic axes by a part of the axis' symbol or of the input's name; the first match wins.
_SIZES = (
    ("batch", 1),
    ("past", 8),
    ("height", 224),
    ("width", 224),
    ("channel", 3),
    ("seq", 32),
    ("len", 32),
    ("time", 64),
    ("frame", 64),
    ("sample", 16000),
)
# Operators that may stand between an input and the Gather that looks it up; between a Gather and its table.
_PASSED = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_STORED = ("Cast", "DequantizeLinear")
# Pixels: the side of ImageNet's crops.
_IMAGE_SIDE = 224
# Of an axis whose name says nothing.
_OTHER_SIZE = 16


# Tried in turn for all guessed axes together if the model does not run with the guesses. 0: caches of no tokens;
# some decoders take one token alone behind others. Not those that make an input of more values than these.
_MOST_VALUES = 2**24
_OTHER_GUESSES = (0, 32, 48, 64, 128, 256, 512, 1024, 224, 320, 640, 8, 4, 2, 1)


def make_synthetic(
    inputs: Inputs,
    *,
    samples: int,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    model: ModelLike | None = None,
    run: bool = True,
) -> Dataset:
    """Make seeded random samples: floats standard normal, booleans with probability 1/2, images in all of uint8, masks
    all 1, lengths those of the samples, other ints 0 or 1, those that may be sizes alike in all samples; where the
    model looks numbers up in a table, rows of it.

    The lengths of a decoder's tokens, caches and masks fit each other; of one in an If every second sample is a prompt.
    A dynamic axis 0 gets size 1, other axes a size suggested by their names; a symbol has one size everywhere.
    dims: sizes by symbol, or by "input:axis" for an axis without one. model: if it does not run with the guessed sizes,
    others are tried, unless it is not to be run.
    Raises DataError for an input of strings or of unknown type or rank, and if the model runs with no guess.
    """
    for value in inputs:
        if value.shape is None or classify_input(value) not in ("float", "int", "bool"):
            cause = f"no random values can be made for it ({format_shape(value)})"
            raise DataError(f"input {value.name!r}", cause, _FIX, code="Q216")

    rows = {}
    if model is not None:
        inputs, rows = settle_caches(inputs, model), count_table_rows(inputs, get_index(model))
    # Without the last rows: the model may look up indices moved by some as well.
    rows = {name: count - count // 8 for name, count in rows.items()}

    def draw(other: int | None = None, lengths: bool = True) -> Dataset:
        sizes = dict(dims or {})
        decoder = find_decoder(inputs)
        if decoder is not None:
            _add_lengths(inputs, decoder, sizes, other)
        shapes = {
            value.name: tuple(_choose_size(value, axis, sizes, other) for axis in range(value.rank))
            for value in inputs
        }
        drawer = _SampleDrawer(inputs, shapes, seed, rows, lengths, decoder)
        listed_shapes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        notes: Lines = (f"seed {seed}", listed_shapes)
        if decoder is not None:
            notes += ("a decoder writes text itself where its data is `self-generated`",)
        source = SampleSource(samples, drawer.draw_sample, lambda i: f"synthetic sample {i}", notes)
        return Dataset(
            source, inputs, range(samples), title="SYNTHETIC random inputs", synthetic=True
        )

    return (
        draw() if model is None or not run else _find_running(draw, Session(model, optimize=False))
    )


def count_table_rows(inputs: Inputs, index: GraphIndex) -> dict[str, int]:
    """Count the rows of the smallest constant table that each input holds the indices of."""

    def list_passed(tensor: TensorId) -> list[TensorId]:
        return [node.result for node in index.readers(tensor) if node.op_type in _PASSED]

    rows: dict[str, int] = {}
    for value in inputs:
        for tensor in walk_from([TensorId(value.name)], list_passed):
            for edge in index.list_consumers(tensor):
                node = index.find_node(edge.node)
                if node.op_type != "Gather" or edge.index != 1 or node.attrs.get("axis", 0):
                    continue
                # A table in fewer bits is behind a Cast or DequantizeLinear.
                maker = index.maker(node, 0, *_STORED)
                table = index.find_input(maker or node)
                shape = index.find_shape(table) if index.is_constant(table) else None
                if shape and isinstance(shape[0], int):
                    rows[value.name] = min(shape[0], rows.get(value.name, shape[0]))
    return rows


def settle_caches(inputs: Inputs, model: ModelLike) -> Inputs:
    """The inputs, with sizes in caches that leave them open, where the reader of a cache tells them.

    onnxruntime-genai's model builder leaves the size of a head open, since a cache in fewer bits has another one, and
    the length of the ring that holds a window of the last tokens.
    """
    opened = {value for value in inputs if _find_past(value) and isinstance(value.dims[-1], str)}
    # The shapes that tell it are not in every file.
    index = get_index(infer_shapes(model) if opened else model)
    return [
        _settle_cache(value, index, TensorId(value.name)) if value in opened else value
        for value in inputs
    ]


def _settle_cache(value: ValueInfo, index: GraphIndex, cache: MaybeTensor) -> ValueInfo:
    """A cache with the sizes that the nodes which read the tensor tell."""
    for node in index.readers(cache):
        if node.op_type == "Cast":
            return _settle_cache(value, index, node.result)
        # Written out, it is joined with the new keys or values, which are as wide.
        joined = int(node.op_type == "Concat")
        heads = node.read_int("num_heads", joined)
        width = (index.input_shape(node, joined) or (None,))[-1]
        if heads and isinstance(width, int):
            # Queries, keys and values may lie in one row.
            heads += 0 if index.find_input(node, 1) else 2 * node.read_int("kv_num_heads", 0)
            ring = (
                node.attrs["local_window_size"]
                if node.attrs.get("sliding_window_cache")
                else value.dims[-2]
            )
            return replace(value, shape=(*value.dims[:-2], ring, width // heads))
    return value


def _find_running(draw: Callable[[int | None, bool], Dataset], session: Session) -> Dataset:
    """Find the first dataset whose first sample the model can run."""
    failures = {}
    opened = max(
        (sum(not isinstance(dim, int) for dim in v.dims[1:]) for v in session.inputs),
        default=0,
    )
    guesses = [guess for guess in _OTHER_GUESSES if guess**opened <= _MOST_VALUES]
    # An axis may be another one than that whose length an input tells: such a length is 0 or 1 in the end.
    for guess in product((None, *guesses), (True, False)):
        dataset = draw(*guess)
        # Of an If decoder every second sample runs the other branch. Without one, or lengths, guesses are alike.
        count = min(2, len(dataset)) if find_decoder(session.inputs) else 1
        samples = [dataset[k] for k in range(count)]
        drawn = tuple((value.shape, value.tobytes()) for value in samples[0].values())
        if drawn in failures:
            continue
        try:
            for sample in samples:
                session.run(sample)
        except ModelError as error:
            failures[drawn] = error.fault
        else:
            return dataset
    cause = f"the model runs with none of the sizes tried ({next(iter(failures.values()))})"
    raise DataError("synthetic inputs", cause, f"name sizes with `fix=…`, {_FIX}", code="Q216")


def _add_lengths(
    inputs: Inputs, decoder: DecoderInputs, sizes: dict[str, int], other: int | None
) -> None:
    """Choose the lengths of a decoder's tokens, caches and masks, in place, so that they fit each other."""

    def choose(keys: Iterable[str], part: str) -> int:
        guess = dict(_SIZES)[part] if other is None or (other, part) == (0, "seq") else other
        size = next((sizes[key] for key in keys if key in sizes), guess)
        sizes.update((key, size) for key in keys if key not in sizes)
        return size

    new = decoder.new if isinstance(decoder.new, int) else choose((decoder.new,), "seq")
    whole = choose(sorted(decoder.past), "past") + new
    sizes.update((key, whole) for key in decoder.whole if key not in sizes)


def _choose_size(value: ValueInfo, axis: int, sizes: dict[str, int], other: int | None) -> int:
    """Choose the size of an axis; guesses are stored in `sizes` by symbol. other: replaces a guess above 1."""
    dim = value.dims[axis]
    if isinstance(dim, int):
        return dim
    key = name_axis(value, axis)
    guess = _guess_size(value, axis, key.lower())
    return sizes.setdefault(key, guess if not other or guess == 1 else other)


def _guess_size(value: ValueInfo, axis: int, symbol: str) -> int:
    rank = value.rank
    # [layers, batch, features] is how recurrent networks keep their state.
    if axis == 0 or (rank == 3 and axis == 1 and isinstance(value.dims[0], int)):
        return 1
    for part, size in _SIZES:
        if part in symbol:
            return size
    if rank == 4:
        channels_last = value.dims[-1] in CHANNELS
        return 3 if axis == (3 if channels_last else 1) else _IMAGE_SIDE
    return 32 if rank == 2 and classify_input(value) == "int" else _OTHER_SIZE


@dataclass(frozen=True)
class _SampleDrawer:
    """Draws random samples. Sample i depends on the seed and i only, so that choosing others does not change it.

    decoder: the parts of the inputs; None for other models. The rest as of `make_synthetic`.
    """

    inputs: Inputs
    shapes: InputShapes
    seed: int
    rows: Mapping[str, int]
    lengths: bool
    decoder: DecoderInputs | None

    def draw_sample(self, i: int) -> Feeds:
        """The inputs of sample i."""
        # A generator per sample: the order of reading does not matter.
        rng = np.random.default_rng((self.seed, i))
        feeds = {value.name: self._draw_values(rng, value) for value in self.inputs}
        return (
            feeds
            if self.decoder is None
            else self._join_parts(feeds, self.decoder, cached=i % 2 == 0)
        )

    def _join_parts(self, feeds: Feeds, decoder: DecoderInputs, *, cached: bool) -> Feeds:
        """A decoder's inputs made one sample: positions behind the caches, which a prompt has none of."""
        prompt = bool(decoder.switches) and not cached
        # Symbol, size and place of every axis.
        axes = [
            (name_axis(value, axis), size, value.name, axis)
            for value in self.inputs
            for axis, size in enumerate(self.shapes[value.name])
        ]
        past = next((size for key, size, *_ in axes if key in decoder.past), 0)
        drawn = dict(feeds)
        for key, size, name, axis in axes if prompt else ():
            if key in decoder.past | decoder.whole:
                length = 0 if key in decoder.past else size - past
                feeds[name] = np.take(drawn[name], range(length), axis)
        for name in decoder.switches:
            feeds[name] = np.full_like(drawn[name], cached)
        start = 0 if prompt else past
        for name in decoder.positions:
            shape = feeds[name].shape
            feeds[name] = np.broadcast_to(
                np.arange(start, start + shape[1], dtype=feeds[name].dtype), shape
            ).copy()
        return feeds

    def _draw_values(self, rng: np.random.Generator, value: ValueInfo) -> Array:
        shape = self.shapes[value.name]
        want = find_input_dtype(value) or np.dtype(np.float32)
        # Keras stores even the indices of a table as floats.
        kind = classify_input(value) or "float"
        if kind == "float" and value.name not in self.rows:
            return np.asarray(rng.standard_normal(shape)).astype(want)
        # A random mask would hide a part of the sample.
        if kind == "int" and "mask" in value.name.lower():
            return np.ones(shape, want)
        # A random length would do so, too.
        length = get_length(value, self.inputs, self.shapes) if self.lengths else 0
        if length:
            return np.full(shape, length, want)
        # Sizes are the same in each sample, since the model is tried with those of the first.
        if len(shape) < 2 and value.name not in self.rows:
            rng = np.random.default_rng(self.seed)
        # Eight bits of fewer axes than a picture has may be flags.
        count = 256 if want == np.uint8 and len(shape) > 2 else 2
        return np.asarray(rng.integers(0, self.rows.get(value.name, count), shape)).astype(want)
