"""Results: where they may go is settled before the work begins; they are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from onnxq.errors import OutputError


def check_free(model: str | Path, *outputs: str | Path | None, force: bool = False) -> None:
    """Raise OutputError for an output that is the input, exists without `force`, or has no folder to be in.

    model: the input's path, "" when it is no file.
    """
    if str(model) and not os.path.exists(model):
        return  # The model's own error says more than one about a folder beside it.
    wanted = [Path(output) for output in outputs if output is not None]
    for position, path in enumerate(wanted):
        if str(model) and os.path.realpath(path) == os.path.realpath(model):
            raise OutputError(
                path, "is the input model, which is never overwritten", "choose another name", code="Q602"
            )
        if any(os.path.realpath(path) == os.path.realpath(other) for other in wanted[:position]):
            raise OutputError(path, "is asked for twice", "give the outputs different names", code="Q602")
        if os.path.isdir(path):
            raise OutputError(path, "is a folder", "give a file name", code="Q603")
        if os.path.exists(path) and not force:
            raise OutputError(path, "exists", "choose another name, or overwrite it with `force=True`", code="Q601")
        if not os.path.isdir(path.parent):
            raise OutputError(path, f"there is no folder {path.parent}", "create it first", code="Q603")


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to a temporary file beside `path` and rename it; OutputError when that cannot be done."""
    if os.path.exists(path) and not overwrite:
        raise OutputError(path, "exists", "choose another name, or overwrite it with `force=True`", code="Q601")
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
            raise OutputError(
                path, error.strerror or str(error), "free space or choose another folder", code="Q604"
            ) from error
        raise
