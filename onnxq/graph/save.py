"""Writing a model so that a failure, a full disk or Ctrl-C leaves what was there before untouched."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto

from onnxq.errors import OutputError
from onnxq.graph.encode import encode_tensor
from onnxq.graph.held import filled
from onnxq.graph.values import decode_tensor
from onnxq.graph.weights import is_large, lighten, locate_initializers, model_bytes, restore

# protobuf's limit on one message, less what names and nodes may take.
_ONE_FILE = 2**31 - 2**24
# Engines map the file into memory page by page.
_ALIGNMENT = 4096


def save_model(proto: ModelProto, path: str | Path, *, external: bool | None = None, overwrite: bool = False) -> None:
    """Write a model atomically: first beside the target, then renamed over it. Same model, same bytes.

    external: put initializers over 4 KB, if there are any, into `<file name>.data`; by default only over 2 GB. Raises
    OutputError when the file is there already (unless overwrite), cannot be written, or the disk is full.
    """
    path, proto = Path(path), filled(proto)
    targets = [path]
    if external is None:
        external = model_bytes(proto) > _ONE_FILE
    external = external and any(is_large(tensor) for _, tensor in locate_initializers(proto))
    if external:
        targets.append(path.with_name(f"{path.name}.data"))
    _check_targets(targets, overwrite)
    with _replacing(targets) as files:
        if external:
            proto = _spill(proto, files[1], targets[1].name)
        try:
            data = proto.SerializeToString(deterministic=True)
        except Exception as error:  # protobuf: over 2 GB
            raise OutputError(
                path, f"cannot be serialized ({error})", "fold Constant nodes first", code="Q604"
            ) from error
        files[0].write(data)


def _check_targets(targets: list[Path], overwrite: bool) -> None:
    folder = targets[0].parent
    if not folder.is_dir():
        raise OutputError(folder, "there is no such folder", "create it first", code="Q603")
    for target in targets:
        if target.is_dir():
            raise OutputError(target, "is a folder", "name a file", code="Q603")
        if os.path.lexists(target) and not overwrite:
            raise OutputError(
                target, "exists already", "choose another name, or overwrite it with `overwrite=True`", code="Q601"
            )


@contextmanager
def _replacing(targets: list[Path]) -> Iterator[list[BinaryIO]]:
    """Open one temporary file per target; on success rename them all, data before model, else remove them."""
    token = secrets.token_hex(4)
    temporary = [target.with_name(f".{target.name}.{token}.tmp") for target in targets]
    files: list[BinaryIO] = []
    try:
        for name in temporary:
            files.append(name.open("xb"))
        yield files
        for file in files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for name, target in reversed(list(zip(temporary, targets, strict=True))):
            os.replace(name, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        cause = "there is no room left on the disk" if full else f"cannot be written ({error.strerror or error})"
        raise OutputError(
            targets[0], cause, "free some space" if full else "check the folder's permissions", code="Q604"
        ) from error
    finally:
        for file in files:
            with suppress(OSError):  # a full disk shows again when the buffer is flushed
                file.close()
        for name in temporary:
            name.unlink(missing_ok=True)


def _spill(proto: ModelProto, file: BinaryIO, location: str) -> ModelProto:
    """Write the large initializers to `file`; returns the model that refers to them."""
    light, payload = lighten(proto)
    offset = 0
    for key, stub in locate_initializers(light):
        tensor = payload.initializers.get(key)
        if tensor is None or tensor.data_type == TensorProto.STRING:
            continue
        raw = tensor.raw_data or encode_tensor(tensor.name, decode_tensor(tensor), tensor.data_type).raw_data
        padding = -offset % _ALIGNMENT
        file.write(b"\0" * padding)
        file.write(raw)
        offset += padding
        stub.ClearField("raw_data")
        stub.data_location = TensorProto.EXTERNAL
        for entry, value in (("location", location), ("offset", str(offset)), ("length", str(len(raw)))):
            stub.external_data.add(key=entry, value=value)
        offset += len(raw)
        del payload.initializers[key]
    return restore(light, payload)
