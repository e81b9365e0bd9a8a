"""`onnxq build-kernels`: the torch front end's kernels, compiled ahead of time."""

from collections.abc import Sequence
from dataclasses import dataclass

from onnxq.errors import MissingDependencyError
from onnxq.files import name_folder
from onnxq.kernels import Built, build_kernels
from onnxq.progress import Progress, silent
from onnxq.report import Parts, ResultFormat, Text, TextView, make_table
from onnxq.sites import Names


@dataclass(frozen=True)
class Kernels:
    """Libraries and images, built or missing. for_gpus: asked for, so that it is a fault if theirs are missing."""

    kernels: tuple[Built, ...]
    for_gpus: bool = False

    @property
    def missing(self) -> list[Built]:
        """Those that could not be built."""
        return [kernel for kernel in self.kernels if kernel.state == "missing"]


def build(
    archs: Sequence[str], out: str | None, force: bool, *, progress: Progress = silent
) -> Kernels:
    """Compile the kernels. archs: GPUs to compile for. out: a folder for machines of the same kind."""
    built = build_kernels(archs, output=name_folder(out), force=force, progress=progress)
    return Kernels(built, for_gpus=bool(archs))


def find_missing_kernels(result: Kernels) -> MissingDependencyError | None:
    """The error of kernels that could not be built; None where that is no fault.

    A machine without nvcc is no fault, unless kernels for GPUs were asked for, as long as something was built.
    """
    missing = result.missing
    faults = [kernel for kernel in missing if kernel.kernels == "CUDA"] if result.for_gpus else []
    if len(missing) == len(result.kernels):
        faults = faults or missing
    return (
        MissingDependencyError(f"{faults[0].kernels} kernels", faults[0].reason) if faults else None
    )


def _make_parts(result: Kernels, view: TextView) -> Parts:
    rows = [_make_row(kernel) for kernel in result.kernels if kernel.state != "missing"]
    if rows:
        columns = ("kernels", "for", "state", "made by", "KiB", "s", "file")
        yield make_table(columns, rows, right=("KiB", "s"), names=("file",), fold=("for",))


def _make_row(kernel: Built) -> Names:
    # Host libraries have no architectures.
    goal = " ".join(kernel.archs) or "this processor"
    size = f"{kernel.size / 1024:.0f}"
    return (
        kernel.kernels,
        goal,
        kernel.state,
        kernel.made_by,
        size,
        f"{kernel.seconds:.1f}",
        kernel.path,
    )


FORM = ResultFormat[Kernels](
    make_parts=_make_parts,
    list_warnings=lambda result: [
        Text(f"no {kernel.kernels} kernels: {kernel.reason}") for kernel in result.missing
    ],
    hidden="for_gpus",
    find_fault=find_missing_kernels,
)
