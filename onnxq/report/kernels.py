"""The results of `build-kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnxq.errors import MissingDependencyError
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.terminal import View, make_table, show_result

if TYPE_CHECKING:
    from onnxq.kernels import Built


def show_kernels(built: Sequence[Built], view: View = View(), *, error: Mapping[str, Any] | None = None) -> None:
    """Print one row per library or image, and the reasons for missing ones. error: what the command fails with."""
    made = [one for one in built if one.state != "missing"]
    columns = ("kernels", "for", "state", "made by", "KiB", "s", "file")
    table = make_table(columns, map(_make_row, made), right=("KiB", "s"), names=("file",), fold=("for",))
    missing = [Text(f"no {one.kernels} kernels: {one.reason}") for one in built if one.state == "missing"]
    show_result(view, lambda: kernels_json(built, error), [table] if made else [], missing)


def find_missing_kernels(built: Sequence[Built], *, asked: bool) -> MissingDependencyError | None:
    """The error of kernels that could not be built; None where that is no fault.

    asked: for GPUs. Else a machine without nvcc is no fault, as long as something was built.
    """
    missing = [one for one in built if one.state == "missing"]
    wanted = [one for one in missing if one.kernels == "CUDA"] if asked else []
    for one in wanted or (missing if len(missing) == len(built) else []):
        return MissingDependencyError(f"{one.kernels} kernels", one.reason)
    return None


def kernels_json(built: Sequence[Built], error: Mapping[str, Any] | None = None) -> str:
    """Convert the results to one JSON document."""
    return to_json({"schema": SCHEMA, "error": error, "kernels": [asdict(one) for one in built]})


def _make_row(one: Built) -> tuple[str, ...]:
    # Host libraries have no architectures.
    goal = " ".join(one.archs) or "this processor"
    return one.kernels, goal, one.state, one.made_by, f"{one.size / 1024:.0f}", f"{one.seconds:.1f}", one.path
