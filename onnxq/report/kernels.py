"""The results of `build-kernels`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from rich.text import Text

from onnxq.report.document import SCHEMA, to_json
from onnxq.report.terminal import make_table, print_renderable, write_stream

if TYPE_CHECKING:
    from onnxq.kernels import Built


def show_kernels(
    built: Sequence[Built],
    *,
    as_json: bool = False,
    quiet: bool = False,
    error: Mapping[str, Any] | None = None,
    stream: IO[str] | None = None,
    errors: IO[str] | None = None,
    width: int | None = None,
) -> None:
    """Print one row per library or image to `stream` (stdout), and the reasons for missing ones.

    quiet: only missing ones, to `errors` (stderr). error: the reason, for the JSON, if the command fails.
    """
    if as_json:
        write_stream(kernels_json(built, error), stream)
        return
    made = [one for one in built if one.state != "missing"]
    if made and not quiet:
        columns = ("kernels", "for", "state", "made by", "KiB", "s", "file")
        print_renderable(
            make_table(columns, map(_make_row, made), right=("KiB", "s"), names=("file",), fold=("for",)), stream, width
        )
    for one in built:
        if one.state == "missing":
            quietly = sys.stderr if errors is None else errors
            print_renderable(Text(f"no {one.kernels} kernels: {one.reason}"), quietly if quiet else stream, width)


def kernels_json(built: Sequence[Built], error: Mapping[str, Any] | None = None) -> str:
    """Convert the results to one JSON document."""
    return to_json({"schema": SCHEMA, "error": error, "kernels": [asdict(one) for one in built]})


def _make_row(one: Built) -> tuple[str, ...]:
    # Host libraries have no architectures.
    goal = " ".join(one.archs) or "this processor"
    return one.kernels, goal, one.state, one.made_by, f"{one.size / 1024:.0f}", f"{one.seconds:.1f}", one.path
