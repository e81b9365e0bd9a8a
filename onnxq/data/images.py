"""Image files, preprocessed by the configuration. Pillow is imported with the first image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import Array, as_float32
from onnxq.config import ImageConfig
from onnxq.data.fit import Inputs, find_input_dtype, format_shape, is_integer
from onnxq.data.sources import SampleSource, read_lazily
from onnxq.errors import DataError, MissingDependencyError, suggest_names
from onnxq.files import register_input
from onnxq.graph import ValueInfo

# Formats that Pillow's wheels read.
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
)


def find_images(folder: Path) -> list[Path]:
    """List the image files below the folder, sorted by path."""
    return sorted(
        p
        for p in folder.rglob("*")
        if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()
    )


def open_images(
    files: Sequence[Path], folder: Path, inputs: Inputs, config: ImageConfig | None
) -> SampleSource:
    """Make a source with one sample per image.

    Raises DataError without a preprocessing, for an input that is not [N, C, H, W] or [N, H, W, C], and for a model
    with further inputs.
    """
    if config is None:
        cause = "is a folder of images, and nothing says how they become the model's input"
        fix = "give a configuration with `data: {images: {size: [224, 224], mean: […], std: […]}}`"
        raise DataError(folder, cause, fix, code="Q214")
    value = _find_input(inputs, config, str(folder))
    _import_pillow()  # a missing package shows now, not in the middle of the work
    for file in files:
        register_input(file)
    return read_lazily(
        files,
        lambda path: {value.name: read_image(path, config, value)},
        lambda path: str(path.relative_to(folder)),
    )


def _find_input(inputs: Inputs, config: ImageConfig, where: str) -> ValueInfo:
    names = [value.name for value in inputs]
    if config.input and config.input not in names:
        subject = f"data.images.input {config.input!r}"
        raise DataError(
            subject, "the model has no such input", suggest_names(config.input, names), code="Q208"
        )
    if len(inputs) != 1:
        cause = f"gives images for one input, the model has {len(inputs)}: {', '.join(names)}"
        raise DataError(where, cause, "use .npz files", code="Q214")
    value = inputs[0]
    if value.shape is not None and len(value.shape) != 4:
        cause = f"does not take images: it is {format_shape(value)}"
        raise DataError(f"input {value.name!r}", cause, "use .npz files", code="Q214")
    return value


def read_image(path: Path, config: ImageConfig, value: ValueInfo) -> Array:
    """Read one image as [1, C, H, W] or [1, H, W, C] in the input's dtype: scaled to `range`, minus mean, over std.

    An integer input gets the pixels themselves (0 … 255). Raises DataError naming the file.
    """
    pixels = _read_pixels(path, config)
    want = find_input_dtype(value) or np.dtype(np.float32)
    if is_integer(value):
        array = pixels.astype(want)
        if config.mean or config.std:
            cause = f"is {want}: it takes pixels as they are"
            raise DataError(f"input {value.name!r}", cause, "leave mean and std out", code="Q214")
    else:
        low, high = config.range
        scaled = as_float32(pixels) * np.float32((high - low) / 255.0) + np.float32(low)
        scaled -= as_float32(config.mean or (0.0,))
        scaled /= as_float32(config.std or (1.0,))
        array = scaled.astype(want)
    # Pixels come as [H, W, C].
    if config.layout == "NCHW":
        array = array.transpose(2, 0, 1)
    return np.ascontiguousarray(array[None])


def _read_pixels(path: Path, config: ImageConfig) -> Array:
    """Read an image as uint8 [H, W, C] of the configured size and colour order."""
    image_module = _import_pillow()
    try:
        with image_module.open(path) as opened:
            # Pillow decodes the pixels only now.
            image = opened.convert("L" if config.color == "GRAY" else "RGB")
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise DataError(
            path, f"is not a readable image ({error})", "remove or replace it", code="Q204"
        ) from error
    pixels = np.asarray(_place_image(image_module, image, config), np.uint8)
    if config.color == "GRAY":
        return pixels[:, :, None]
    return pixels[:, :, ::-1] if config.color == "BGR" else pixels


def _place_image(image_module: Any, image: Any, config: ImageConfig) -> Any:
    """Bring an image to the configured size: crop its middle, fit and pad it, or stretch it."""
    height, width = config.size
    method = getattr(image_module.Resampling, config.interpolation.upper())
    if config.crop == "none":
        return image.resize((width, height), method)
    ratios = (height / image.height, width / image.width)
    if config.crop == "pad":
        inner = _scale_image(image, min(ratios), config.size, method)
        fill = config.fill if image.mode == "L" else (config.fill,) * 3
        canvas = image_module.new(image.mode, (width, height), fill)
        canvas.paste(inner, ((width - inner.width) // 2, (height - inner.height) // 2))
        return canvas
    if config.resize is None:
        resized = _scale_image(image, max(ratios), config.size, method)
    else:
        resized = _scale_image(image, config.resize / min(image.size), None, method)
    # Rounded as by torchvision's CenterCrop.
    left = round((resized.width - width) / 2.0)
    top = round((resized.height - height) / 2.0)
    # Pillow's crop fills with black beyond the borders of a smaller image.
    return resized.crop((left, top, left + width, top + height))


def _scale_image(image: Any, ratio: float, reach: tuple[int, int] | None, method: Any) -> Any:
    """Resize by a ratio as torchvision does (the longer side truncated); the side that sets the ratio hits `reach`."""
    # 1e-6: a product meant to be whole may come out just below it.
    height = int(image.height * ratio + 1e-6)
    width = int(image.width * ratio + 1e-6)
    if reach is not None:
        exact = (round(image.height * ratio), round(image.width * ratio))
        height = reach[0] if exact[0] == reach[0] else height
        width = reach[1] if exact[1] == reach[1] else width
    return image.resize((max(width, 1), max(height, 1)), method)


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        fix = 'pip install "onnxq[images]"'
        raise MissingDependencyError(
            "Pillow", "is needed to read images", fix, code="Q803"
        ) from error
    return Image
