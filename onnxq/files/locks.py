"""Temporary files and folders that show by a lock whether the process that made them still lives.

A lock ends with its process, however that ends; a process id does not mean the same in every container and on every
host that shares a folder. Where there are no locks, nothing is ever taken for stale.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

# Names of nothing else, so that nobody's own files are ever removed; short whatever the output is called.
_NAME = re.compile(r"\.onnxq-[0-9a-f]{16}\.tmp")


def temporary_name() -> str:
    """A fresh name for a temporary file or folder, one that `remove_stale` knows."""
    return f".onnxq-{secrets.token_hex(8)}.tmp"


def lock_new(descriptor: int, path: Path) -> bool:
    """Lock what was just made at `path`; False when another run took it for stale in between, and removed it."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return True  # A file system without locks: nobody else can lock it either, so nobody removes it.
    return os.path.lexists(path)


def remove_stale(folder: Path) -> None:
    """Remove the temporary files and folders in `folder` that runs of this user left there and no process holds."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return
    for name in names:
        _remove_unheld(folder / name)


def _remove_unheld(path: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    # The lock is refused while the run that made it lives; what cannot be removed is left.
    with suppress(OSError):
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            elif stat.S_ISREG(found.st_mode):
                path.unlink()
    os.close(descriptor)
