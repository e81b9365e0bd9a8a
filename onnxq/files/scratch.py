"""Temporary files and folders. Each is removed at the end of its run, or by the next run if its own was killed.

They are locked while their process lives, as are files that several processes build. The system releases a lock however
a process ends. A process id would not do: it means something else in every container and on every host that shares a
folder. On systems without locks nothing is ever taken for stale. Temporary files and folders are locked themselves, by
`fcntl`: filelock would leave a lock file beside each. On Windows a folder is stale once nobody has the file beside it
open, as after a run that had arrays in it mapped to its end.
"""

import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from onnxq.errors import OutputError

if sys.platform != "win32":
    import fcntl

# Matches no file of anybody else, so that nothing of theirs is ever removed. Independent of the output's name, which
# may already be as long as the file system allows.
_NAME = re.compile(r"\.onnxq-[0-9a-f]{16}\.tmp")


# Seconds; no build takes as long.
_PATIENCE = 1800.0


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` inside. Where files cannot be locked, go on without: then work may be done twice."""
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            stack.enter_context(FileLock(path, timeout=_PATIENCE))
        yield


def make_temporary_name() -> str:
    """Make a fresh name for a temporary file or folder, in the form that `remove_stale_files` recognises."""
    return f".onnxq-{secrets.token_hex(8)}.tmp"


def lock_new_file(descriptor: int, path: Path) -> bool:
    """Lock the file or folder just made at `path`. False if another run removed it as stale before it was locked."""
    locked = False
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
    # On a file system without locks nobody else can lock it either, so nobody removes it.
    return not locked or os.path.lexists(path)


def remove_stale_files(folder: Path) -> None:
    """Remove temporary files and folders of this user in `folder` that no process has locked."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return
    for name in names:
        _remove_if_unlocked(folder / name)


def _remove_if_unlocked(path: Path) -> None:
    if sys.platform == "win32":
        # It cannot be removed while the run that made it lives, and has it open.
        with suppress(OSError):
            _name_lock(path).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            # A link or a pipe of this name is not ours: neither follow the one nor wait for a writer of the other.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        # Locking fails while the run that made it lives. Whatever cannot be removed is left.
        with suppress(OSError):
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                elif stat.S_ISREG(status.st_mode):
                    path.unlink()
        os.close(descriptor)


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
            self.path, descriptor = _make_folder(base)
        except OSError as error:
            where = str(parent or os.environ.get("TMPDIR", "the temporary folder"))
            cause = f"no temporary folder can be made there ({error.strerror or error})"
            raise OutputError(
                where, cause, "free space, or set TMPDIR to another folder", code="Q604"
            ) from error
        # A finalizer, unlike __del__, also runs when the interpreter exits.
        self._end = weakref.finalize(self, _remove_folder, self.path, descriptor)

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
        # Windows opens no folders, and the file has to be there before others see the folder.
        beside = os.open(_name_lock(path), os.O_CREAT) if sys.platform == "win32" else None
        path.mkdir(mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY) if beside is None else beside
        except FileNotFoundError:  # Another run took it for stale already.
            continue
        if lock_new_file(descriptor, path):
            return path, descriptor
        os.close(descriptor)


def _name_lock(path: Path) -> Path:
    """The file that Windows has in the place of the lock of a folder: open while the folder's run lives."""
    return path.with_name(f"{path.name}.lock")


def _remove_folder(path: Path, descriptor: int) -> None:
    try:
        # First, since Windows removes nothing that is open. Another run may take the folder for stale now, and helps.
        os.close(descriptor)
        _name_lock(path).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:  # a signal: remove the rest, then let it take effect
        shutil.rmtree(path, ignore_errors=True)
        raise
