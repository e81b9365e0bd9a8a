"""`onnxq build-kernels`: the torch front end's kernels, compiled ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from onnxq.cli import options
from onnxq.cli.errors import show_outcome
from onnxq.cli.group import ModelCommand

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("build-kernels", cls=ModelCommand)
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="GPU to compile for: sm_90 or 9.0; repeatable. [default: all that nvcc knows, from sm_75 on]",
)
@options.make_output(
    "Build into FOLDER, for machines of the same kind (x86-64-v3), not for this processor into your cache.",
    metavar="FOLDER",
)
@click.option("--force", is_flag=True, help="Build again what is there.")
@options.as_json
@options.quiet
def run_command(archs: tuple[str, ...], out: str | None, force: bool, view: View) -> int:
    """Compile the fake-quant kernels: for the CPU with the C++ compiler, for GPUs with nvcc, or else with NVRTC.

    They are compiled on first use anyway; this does it before, and for GPUs that are not in this machine.

    \b
    Examples:
      onnxq build-kernels
      onnxq build-kernels --arch 8.6 --arch 9.0
    """
    from onnxq import report

    with report.show_progress("building kernels", quiet=view.quiet) as progress:
        from onnxq.files import name_folder
        from onnxq.kernels import build_kernels
        from onnxq.report.kernels import find_missing_kernels, show_kernels

        built = build_kernels(archs, output=name_folder(out), force=force, progress=progress)
    return show_outcome(show_kernels, built, view, find_missing_kernels(built, asked=bool(archs)))
