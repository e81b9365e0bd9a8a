"""`onnxq build-kernels`: the torch front end's kernels, compiled ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from onnxq.cli import options
from onnxq.cli.errors import error_fields, print_error
from onnxq.errors import MissingDependencyError


@click.command("build-kernels", short_help="Compile the kernels of the torch front end ahead of time.")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="GPU to compile for: sm_90 or 9.0; repeatable. [default: all that nvcc knows, from sm_75 on]",
)
@click.option(
    "--output",
    "-o",
    "out",
    metavar="FOLDER",
    help="Build into FOLDER, for machines of the same kind (x86-64-v3), not for this processor into your cache.",
)
@click.option("--force", is_flag=True, help="Build again what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@options.quiet
def run_command(archs: tuple[str, ...], out: str | None, force: bool, as_json: bool, quiet: bool) -> int:
    """Compile the fake-quant kernels: for the CPU with the C++ compiler, for GPUs with nvcc, or else with NVRTC.

    They are compiled on first use anyway; this does it before, and for GPUs that are not in this machine.

    \b
    Examples:
      onnxq build-kernels
      onnxq build-kernels --arch 8.6 --arch 9.0
    """
    from onnxq import report

    with report.show_progress("building kernels", quiet=quiet) as progress:
        from onnxq.kernels import build_kernels

        built = build_kernels(archs, output=None if out is None else Path(out), force=force, progress=progress)
    # Without --arch a machine without nvcc is no fault, as long as something was built.
    missing = [one for one in built if one.state == "missing"]
    asked = [one for one in missing if one.kernels == "CUDA"] if archs else []
    failed = None
    if asked or len(missing) == len(built):
        one = (asked or missing)[0]
        failed = MissingDependencyError(f"{one.kernels} kernels", one.reason)
    report.show_kernels(built, as_json=as_json, quiet=quiet, error=error_fields(failed) if failed else None)
    return print_error(failed) if failed else 0
