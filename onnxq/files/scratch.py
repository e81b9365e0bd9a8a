"""Temporary folders. Each is removed at the end of its run, or by the next run if its own was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from onnxq.errors import OutputError
from onnxq.files.locks import lock_new_file, make_temporary_name, remove_stale_files

# Folders searched by this process. A temporary folder may hold very many files, so each is searched once.
_looked_through: set[Path] = set()


class ScratchFolder:
    """A new folder for this user alone, removed with the object, at the end of a `with` block, or by `remove`.

    parent: the folder to make it in, by default the system's folder for temporary files.
    Raises OutputError if it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        try:
            base = Path(tempfile.gettempdir()) if parent is None else parent
            remove_leftovers(base)
            self.path, held = _make_folder(base)
        except OSError as error:
            where = str(parent or os.environ.get("TMPDIR", "the temporary folder"))
            cause = f"no temporary folder can be made there ({error.strerror or error})"
            raise OutputError(where, cause, "free space, or set TMPDIR to another folder", code="Q604") from error
        # A finalizer, unlike __del__, also runs when the interpreter exits.
        self._end = weakref.finalize(self, _remove_folder, self.path, held)

    def remove(self) -> None:
        """Remove the folder now."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of ended runs in `folder`; once per process."""
    if folder not in _looked_through:
        _looked_through.add(folder)
        remove_stale_files(folder)


def _make_folder(base: Path) -> tuple[Path, int]:
    while True:
        path = base / make_temporary_name()
        path.mkdir(mode=0o700)
        held = os.open(path, os.O_RDONLY) if hasattr(os, "O_DIRECTORY") else -1
        if held < 0 or lock_new_file(held, path):
            return path, held
        os.close(held)


def _remove_folder(path: Path, held: int) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:  # a signal: remove the rest, then let it take effect
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if held >= 0:
            os.close(held)
