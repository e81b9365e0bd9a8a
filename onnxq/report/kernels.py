"""What `build-kernels` built."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, TYPE_CHECKING

from rich.text import Text

from onnxq.report.document import SCHEMA, to_json
from onnxq.report.terminal import show, table, write

if TYPE_CHECKING:
    from onnxq.kernels import Built


def show_kernels(
    built: Sequence[Built],
    *,
    as_json: bool = False,
    quiet: bool = False,
    stream: IO[str] | None = None,
    errors: IO[str] | None = None,
    width: int | None = None,
) -> None:
    """Print one row per library or image to `stream` (stdout), and why others are missing.

    quiet: only what is missing, to `errors` (stderr).
    """
    if as_json:
        write(kernels_json(built), stream)
        return
    made = [one for one in built if one.state != "missing"]
    if made and not quiet:
        columns = ("kernels", "for", "state", "made by", "KiB", "s", "file")
        show(table(columns, map(_row, made), right=("KiB", "s"), names=("file",), fold=("for",)), stream, width)
    for one in built:
        if one.state == "missing":
            quietly = sys.stderr if errors is None else errors
            show(Text(f"no {one.kernels} kernels: {one.reason}"), quietly if quiet else stream, width)


def kernels_json(built: Sequence[Built]) -> str:
    """The same as one JSON document."""
    return to_json({"schema": SCHEMA, "kernels": [asdict(one) for one in built]})


def _row(one: Built) -> tuple[str, ...]:
    goal = " ".join(one.archs) or "this processor"
    return one.kernels, goal, one.state, one.made_by, f"{one.size / 1024:.0f}", f"{one.seconds:.1f}", one.path
