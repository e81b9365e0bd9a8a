"""Text files: read with errors in words; results, whose place is settled before the work begins, written whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from onnxq.errors import OnnxqError, OutputError


def check_free(model: str | Path, *outputs: str | Path | None, force: bool = False) -> None:
    """Raise OutputError for an output that is the input, exists without `force`, or has no folder to be in.

    model: the input's path, "" when it is no file.
    """
    if str(model) and not os.path.exists(model):
        return  # The model's own error says more than one about a folder beside it.
    wanted = [Path(output) for output in outputs if output is not None]
    for position, path in enumerate(wanted):
        if str(model) and os.path.realpath(path) == os.path.realpath(model):
            raise OutputError(str(path), "is the input model, which is never overwritten", "choose another -o")
        if any(os.path.realpath(path) == os.path.realpath(other) for other in wanted[:position]):
            raise OutputError(str(path), "is asked for twice", "give the outputs different names")
        if path.is_dir():
            raise OutputError(str(path), "is a folder", "give a file name")
        if path.exists() and not force:
            raise OutputError(str(path), "exists", "choose another name, or overwrite it with --force")
        if not path.parent.is_dir():
            raise OutputError(str(path), f"there is no folder {path.parent}", "create it first")


def read_text(path: str | Path, error: type[OnnxqError], fix: str) -> str:
    """The text of a file, without a byte order mark; raises `error` with `fix` where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as found:
        raise error(str(path), "is not a text file", fix) from found
    except (OSError, ValueError) as found:  # ValueError: a name with a NUL in it
        raise error(repr(str(path)) if "\0" in str(path) else str(path), reason_of(found), fix) from found


def reason_of(error: Exception) -> str:
    """Why the system would not: "No such file or directory", without number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to a temporary file beside `path` and rename it; OutputError when that cannot be done."""
    if path.exists() and not overwrite:
        raise OutputError(str(path), "exists", "choose another name, or overwrite it with --force")
    handle, name = -1, ""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException as error:
        if name and os.path.exists(name):
            os.unlink(name)
        if isinstance(error, OSError):
            raise OutputError(str(path), error.strerror or str(error), "free space or choose another folder") from error
        raise
