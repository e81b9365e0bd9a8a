"""Compiled kernels on disk, per user: built once for all processes, validated before every use.

An entry is a file with a note beside it, `<file>.json`: the key (everything the file was built from) and its SHA-256.
Both are renamed into place, the note last. A file that does not match its note or the requested key is built again.
"""

import hashlib
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onnxq.arrays import hash_parts
from onnxq.errors import OutputError
from onnxq.files import ScratchFolder, describe_os_error, hold_lock, replace_files

# Everything that a build depends on: kind, hash of the sources, compiler, flags, processor …
Key = Mapping[str, str]

_FIX = "set ONNXQ_CACHE to a folder of yours"
LOG = logging.getLogger("onnxq")


@dataclass(frozen=True)
class CacheEntry:
    """A file that matches its note."""

    path: Path
    key: Key
    # Built by this call.
    fresh: bool = False


def find_cache() -> Path:
    """Return the cache folder: $ONNXQ_CACHE, else $XDG_CACHE_HOME/onnxq, else ~/.cache/onnxq."""
    # The XDG specification says that relative paths are to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    usual = base if os.path.isabs(base) else "~/.cache"
    return Path(os.environ.get("ONNXQ_CACHE") or f"{usual}/onnxq").expanduser()


def kernels_folder() -> Path:
    """Return the folder of compiled kernels; make it if necessary.

    Code is loaded from it, so nobody else may write to it. Raises OutputError if it cannot be made, belongs to another
    user, or is writable by others.
    """
    place = Path("~/.cache/onnxq")
    try:
        place = find_cache() / "kernels"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    # A RuntimeError: there is no home folder, as of a user id in a container that has no name.
    except (OSError, RuntimeError) as error:
        raise OutputError(place, describe_os_error(error), _FIX, code="Q605") from error
    if hasattr(os, "geteuid") and (
        status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise OutputError(
            place, "others may write to it, and code is loaded from it", _FIX, code="Q605"
        )
    return place


@cache
def _replace_folder(fault: str, fix: str) -> ScratchFolder:
    folder = ScratchFolder()
    LOG.warning(
        "onnxq: %s; kernels go to %s, for this process alone; to keep them, %s",
        fault,
        folder.path,
        fix,
    )
    return folder


def choose_folder(*, libraries: bool = False) -> Path:
    """Return `kernels_folder`; where nothing can be written to it, a folder for this process alone.

    libraries: also where none can be loaded from it. Raises OutputError if neither can be made.
    """
    try:
        place = kernels_folder()
        # Found out before a build, which takes up to a minute, and would in every process.
        if libraries and sys.platform == "linux" and os.statvfs(place).f_flag & os.ST_NOEXEC:
            raise OutputError(place, "code may not be loaded from it (noexec)", _FIX)
        return place
    except OutputError as error:
        return _replace_folder(error.fault, error.fix).path


def find_entry(place: Path, wanted: Callable[[Key], bool]) -> CacheEntry | None:
    """Find an entry of `place` whose key satisfies `wanted` and whose file matches its note; None without any."""
    notes = sorted(place.glob("*.json"))
    entries = (_read_valid(note.with_suffix(""), wanted) for note in notes)
    return next(filter(None, entries), None)


def fetch_entry(
    place: Path | None,
    name: str,
    key: Key,
    build: Callable[[Path], None],
    *,
    force: bool = False,
) -> CacheEntry:
    """Return the entry of `key`; `build(path to write)` makes it unless it exists and is valid.

    place: None for the folder of compiled kernels.
    name: file name with {} for a hash of the key: `lib{}.so`. force: build in any case.
    Other processes that request the same key wait and use the first one's build.
    """
    identity = hash_parts(json.dumps(key, sort_keys=True))[:16]
    path = (place or kernels_folder()) / name.format(identity)

    def same(other: Key) -> bool:
        return other == key

    entry = None if force else _read_valid(path, same)
    if entry is not None:
        return entry
    try:
        with hold_lock(path.with_name(f".{path.name}.lock")):
            # Another process may have built it in the meantime.
            entry = None if force else _read_valid(path, same)
            return entry or _store_entry(path, key, build)
    except OSError as error:
        raise OutputError(path, describe_os_error(error), _FIX, code="Q605") from error


def _read_valid(path: Path, wanted: Callable[[Key], bool]) -> CacheEntry | None:
    try:
        note = json.loads(path.with_name(f"{path.name}.json").read_text("utf-8"))
        key = note["key"]
        if not isinstance(key, dict) or not wanted(key):
            return None
        fits = hashlib.sha256(path.read_bytes()).hexdigest() == note["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CacheEntry(path, key) if fits else None


def _store_entry(path: Path, key: Key, build: Callable[[Path], None]) -> CacheEntry:
    # In the cache itself: builds are loaded once for a test, and /tmp may forbid execution.
    with ScratchFolder(path.parent) as work:
        build(work / path.name)
        data = (work / path.name).read_bytes()
    note = {"key": key, "sha256": hashlib.sha256(data).hexdigest()}
    with replace_files([path.with_name(f"{path.name}.json"), path], overwrite=True) as (
        note_file,
        file,
    ):
        file.write(data)
        note_file.write(json.dumps(note, indent=1, sort_keys=True).encode())
    return CacheEntry(path, key, fresh=True)
