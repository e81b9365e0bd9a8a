"""Text that every Python brings along: its standard library and the documentation in it, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Its tests are not installed everywhere; encodings are tables of numbers; the others are no part of it.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
KINDS = {".py", ".txt", ".rst", ".html"}


def read_library() -> tuple[bytes, bytes]:
    """(training, test) text: whole files behind one another, a byte 0 after each; every tenth file is for tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file
        for file in root.rglob("*")
        if file.suffix in KINDS and not LEFT_OUT & set(file.relative_to(root).parts)
    )
    parts = (bytearray(), bytearray())
    for k, file in enumerate(files):
        parts[k % 10 == 9].extend(file.read_bytes() + b"\0")
    training, test = parts
    return bytes(training), bytes(test)
