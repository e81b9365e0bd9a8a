"""Compiled kernels on disk, per user: built once however many processes ask, checked before every use.

An entry is a file and beside it `<file>.json`, its note: what it was built from (the key) and its SHA-256. Both are
renamed into place, the note last; whatever does not fit its note, or whose key is not the one asked for, is built anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxq.errors import OutputError
from onnxq.files import ScratchFolder

Key = Mapping[str, str]

_FIX = "set ONNXQ_CACHE to a folder of yours"


@dataclass(frozen=True)
class Entry:
    """A file that fits its note. fresh: this call built it."""

    path: Path
    key: Key
    fresh: bool = False


def root() -> Path:
    """$ONNXQ_CACHE, else $XDG_CACHE_HOME/onnxq, else ~/.cache/onnxq."""
    named = os.environ.get("ONNXQ_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path("~/.cache").expanduser()) / "onnxq"


def kernels_folder() -> Path:
    """The folder of compiled kernels, made if it is not there.

    Code is loaded from it, so nobody else may be able to write to it. Raises OutputError if it cannot be made,
    belongs to another user, or is open to others.
    """
    place = root() / "kernels"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
    except OSError as error:
        raise OutputError(place, error.strerror or str(error), _FIX, code="Q605") from error
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise OutputError(place, "others may write to it, and code is loaded from it", _FIX, code="Q605")
    return place


def find(place: Path, wanted: Callable[[Key], bool]) -> Entry | None:
    """An entry of `place` whose key is wanted and whose file fits its note; None if there is none."""
    for note in sorted(place.glob("*.json")):
        entry = _valid(note.with_suffix(""), wanted)
        if entry is not None:
            return entry
    return None


def fetch(place: Path, name: str, key: Key, build: Callable[[Path], None], *, force: bool = False) -> Entry:
    """The entry of `key`, built by `build(path to write)` unless it is there and valid.

    name: the file's, before and after which goes what tells keys apart: `lib{}.so`.
    force: build it even so. Other processes that ask for the same wait and take what the first has built.
    """
    identity = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    path = place / name.format(identity)

    def same(found: Key) -> bool:
        return found == dict(key)

    entry = None if force else _valid(path, same)
    if entry is not None:
        return entry
    try:
        with _locked(path.with_name(f".{path.name}.lock")):
            entry = None if force else _valid(path, same)
            return entry or _store(path, key, build)
    except OSError as error:
        raise OutputError(path, error.strerror or str(error), _FIX, code="Q605") from error


def _valid(path: Path, wanted: Callable[[Key], bool]) -> Entry | None:
    try:
        note = json.loads(path.with_name(f"{path.name}.json").read_text("utf-8"))
        key = note["key"]
        if not isinstance(key, dict) or not wanted(key):
            return None
        fits = hashlib.sha256(path.read_bytes()).hexdigest() == note["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Entry(path, key) if fits else None


def _store(path: Path, key: Key, build: Callable[[Path], None]) -> Entry:
    with ScratchFolder(path.parent) as work:
        made = work / path.name
        build(made)
        note = made.with_name(f"{path.name}.json")
        found = {"key": dict(key), "sha256": hashlib.sha256(made.read_bytes()).hexdigest()}
        note.write_text(json.dumps(found, indent=1, sort_keys=True), "utf-8")
        for one in (made, note):
            with one.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(one, path.with_name(one.name))
    return Entry(path, key, fresh=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; where files cannot be locked, two processes may build the same, and the last one stays."""
    with path.open("wb") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
