"""Text written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from onnxq.errors import OutputError


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
