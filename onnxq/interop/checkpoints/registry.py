"""The formats of checkpoints that `import-weights` reads; another is a file beside this and a row here."""

import json
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from onnxq.errors import CalibrationError
from onnxq.files import AnyPath, describe_os_error, read_text, register_input
from onnxq.interop.checkpoints.base import (
    Checkpoint,
    CheckpointFiles,
    CheckpointWeight,
    WeightCodes,
    fault,
    list_tensors,
)
from onnxq.interop.checkpoints.gguf import GGUF
from onnxq.interop.checkpoints.packed import AWQ, COMPRESSED, GPTQ
from onnxq.sites import JsonObject

_T = TypeVar("_T")
# The first one that recognizes the files reads them.
CHECKPOINTS = (GGUF, GPTQ, AWQ, COMPRESSED)
# Files with the quantization configuration, the last in one of these keys.
_CONFIGS = ("quantize_config.json", "quant_config.json", "config.json")
_KEYS = ("quantization_config", "compression_config")
_MOST_BYTES = 64 * 2**20
_KINDS = "GPTQ, AWQ and compressed-tensors in safetensors, and GGUF, are read"
_NAME = "name the folder of a quantized checkpoint, or its .gguf file"


def open_checkpoint(source: AnyPath) -> Checkpoint:
    """List the quantized weights of a folder or file. Raises CalibrationError for what is none, or is broken."""
    return _read_safely(source, partial(_open, Path(source)))


def _open(path: Path) -> Checkpoint:
    inside = [path] if path.is_file() else sorted(path.iterdir())
    for file in inside:
        register_input(file)
    stored = [file for file in inside if file.suffix == ".safetensors"]
    ggufs = tuple(file for file in inside if file.suffix == ".gguf" and not stored)
    settings = _read_settings(stored[0].parent) if stored else {}
    tensors = {
        name: tensor
        for file in stored
        for name, tensor in _read_safely(file, partial(list_tensors, file)).items()
    }
    files = CheckpointFiles(path, settings, tensors, ggufs)
    chosen = next((row for row in CHECKPOINTS if row.recognizes(files)), None)
    if chosen is None:
        method = settings.get("quant_method")
        held = (
            f"holds weights of {method!r}"
            if method
            else "is no quantized checkpoint of a known format"
        )
        pickled = any(file.suffix in (".bin", ".pt", ".pth") for file in inside) and not stored
        raise fault(
            path,
            f"{held}: {_KINDS}",
            "save it as safetensors: this runs no pickled code" if pickled else _NAME,
        )
    checkpoint = chosen.read(files)
    if not checkpoint.weights and not checkpoint.refused:
        raise fault(path, "holds no quantized weight", _NAME)
    # A folder may hold the same network in several widths, of which each weight would be found.
    names = Counter(row.name for row in checkpoint.weights)
    twice = next((name for name, count in names.items() if count > 1), "")
    if twice:
        raise fault(path, f"holds {twice} in several files", "name one of the .gguf files")
    weights = (
        replace(row, read=partial(_read_safely, f"{path}: {row.name}", partial(_read_weight, row)))
        for row in checkpoint.weights
    )
    return replace(checkpoint, weights=tuple(weights))


def _read_weight(row: CheckpointWeight) -> WeightCodes:
    """The codes of a weight. Raises ValueError where the shapes of its parts do not go together."""
    weight = row.read()
    grid = (row.shape[0], -(-row.shape[1] // weight.size))
    if weight.codes.shape != row.shape or {weight.scale.shape, weight.zero.shape} != {grid}:
        raise ValueError(
            f"{weight.codes.shape} codes, {weight.scale.shape} scales, {weight.zero.shape} zero points"
        )
    return weight


def _read_safely(subject: AnyPath, read: Callable[[], _T]) -> _T:
    """Its result. Raises CalibrationError, in the place of anything else, for files whose parts do not go together."""
    try:
        return read()
    except OSError as error:
        raise fault(subject, describe_os_error(error), _NAME) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        re.error,
        struct.error,
    ) as error:
        raise fault(
            subject, f"is not whole, or contradicts itself ({error})", "download it again"
        ) from error


def _read_settings(folder: Path) -> JsonObject:
    """The quantization configuration beside the tensors; {} for none."""
    settings: JsonObject = {}
    # Older tools wrote a file of their own; where both are there, it says more.
    for path in (folder / name for name in _CONFIGS):
        if path.is_file():
            text = read_text(
                path, CalibrationError, "download it again", limit=_MOST_BYTES, code="Q514"
            )
            values = _read_safely(path, partial(json.loads, text))
            nested = [values[key] for key in _KEYS if isinstance(values.get(key), dict)]
            settings = {
                **(nested[0] if nested else values if path.name != _CONFIGS[-1] else {}),
                **settings,
            }
    return settings
