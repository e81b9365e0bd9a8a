"""Writing a model so that a failure, a full disk or Ctrl-C leaves the old file untouched."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import ModelProto, TensorProto

from onnxq.arrays import Bytes
from onnxq.errors import OutputError
from onnxq.files import AnyPath, is_stream, replace_files
from onnxq.graph.light import ModelLike, WeightStore, bare_proto, count_light_bytes, store_of
from onnxq.graph.scopes import set_location
from onnxq.graph.skeleton import ONE_MESSAGE, write_model
from onnxq.graph.storage import (
    SMALL_BYTES,
    count_tensor_bytes,
    cut_bytes,
    is_stub,
    locate_tensors,
    omit_weights,
    restore_weights,
    write_stub,
)
from onnxq.graph.values import decode_tensor, encode_tensor

# Engines map the file into memory page by page.
_ALIGNMENT = 4096


def save_model(
    model: ModelLike,
    path: AnyPath,
    *,
    external: bool | None = None,
    least: int = SMALL_BYTES + 1,
    overwrite: bool = False,
    inputs: Sequence[Path] = (),
) -> None:
    """Write a model atomically: first beside the target, then renamed over it. Same model, same bytes.

    external: put initializers of `least` bytes and more, by default over 4 KB, if there are any, into
        `<file name>_data`; by default only over 2 GB.
    inputs: files that are never written over.
    Raises OutputError when the file is there already (unless overwrite), cannot be written, or the disk is full.
    """
    path = Path(path)
    proto = bare_proto(model)
    targets = [path]
    if external is None:
        external = count_light_bytes(model) > ONE_MESSAGE
    external = external and any(
        count_tensor_bytes(tensor) >= least for _, tensor in locate_tensors(proto, constants=False)
    )
    if external:
        targets.append(name_data_file(path))
        for target in targets:
            check_data_name(target)
    with replace_files(targets, overwrite=overwrite, inputs=inputs) as files:
        if external:
            proto = _write_weights(model, files[1], targets[1].name, least)
        store = store_of(model)
        try:
            for piece in write_model(proto, lambda tensor: cut_bytes(_read_bytes(tensor, store))):
                files[0].write(piece)
        except OSError:
            raise
        except Exception as error:  # protobuf does not say which of its errors: over 2 GB
            cause = f"cannot be serialized ({error})"
            raise OutputError(path, cause, "fold Constant nodes first", code="Q604") from error


def name_data_file(path: AnyPath) -> Path:
    """Where the weights of a model at `path` go when they get a file of their own, by the name that hubs look for."""
    return Path(path).with_name(f"{Path(path).name}_data")


def check_data_name(target: Path) -> None:
    """Raise OutputError for a model or data file that cannot refer to the other by name."""
    if is_stream(target):
        cause = "is a pipe or device, and the weights belong into a file beside the model"
        raise OutputError(
            target, cause, "name a file, or keep the weights in the model", code="Q603"
        )
    try:
        target.name.encode("utf-8")
    except UnicodeEncodeError as error:
        cause = "the name is not UTF-8, and a model names the file of its weights in UTF-8"
        fix = "choose another name, or keep the weights in the model"
        raise OutputError(target, cause, fix, code="Q604") from error


def _write_weights(model: ModelLike, file: BinaryIO, location: str, least: int) -> ModelProto:
    """Write the initializers of `least` bytes and more to `file`, one after another.

    Returns the model that refers to them.
    """
    proto = bare_proto(model)
    light, omitted = omit_weights(proto)
    store = store_of(model)
    offset = 0
    both = zip(
        locate_tensors(light, constants=False), locate_tensors(proto, constants=False), strict=True
    )
    for (key, tensor), (_, original) in both:
        if original.data_type == TensorProto.STRING or count_tensor_bytes(original) < least:
            continue
        offset += file.write(b"\0" * (-offset % _ALIGNMENT))
        length = 0
        for piece in cut_bytes(_read_bytes(original, store)):
            length += file.write(piece)
        # Small ones have their values in any field.
        tensor.Clear()
        write_stub(original, tensor)
        tensor.ClearField("raw_data")
        set_location(tensor, location=location, offset=offset, length=length)
        offset += length
        omitted.pop(key, None)
    return restore_weights(light, omitted)


def _read_bytes(tensor: TensorProto, store: WeightStore | None) -> Bytes:
    if store is not None and is_stub(tensor):
        return store.bytes_of(tensor)
    raw = (
        # Numbers may also stand in typed fields (float_data, int32_data).
        tensor.raw_data
        or encode_tensor(tensor.name, decode_tensor(tensor), tensor.data_type).raw_data
    )
    return np.frombuffer(raw, np.uint8)
