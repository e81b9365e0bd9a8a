"""Locks: between processes that build the same file, and on temporary files and folders while their process lives.

The system releases a lock however a process ends. A process id would not do: it means something else in every
container and on every host that shares a folder. On systems without locks nothing is ever taken for stale.
Temporary files and folders are locked themselves, by `fcntl`: filelock would leave a lock file beside each.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

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
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return True  # A file system without locks: nobody else can lock it either, so nobody removes it.
    return os.path.lexists(path)


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
        return
    try:
        # A link or a pipe of this name is not ours: neither follow the one nor wait for a writer of the other.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    # Locking fails while the run that made it lives. Whatever cannot be removed is left.
    with suppress(OSError):
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            elif stat.S_ISREG(found.st_mode):
                path.unlink()
    os.close(descriptor)
