"""`onnxq merge`: parts of a calibration joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("merge", cls=ModelCommand)
@click.argument("parts", nargs=-1, required=True, metavar="PART.json...")
@options.make_output("The merged ranges.", metavar="RANGES.json")
@options.force
@options.as_json
@options.quiet
def run_command(parts: tuple[str, ...], out: str | None, force: bool, view: View) -> None:
    """Join parts that `onnxq calibrate` wrote, in any order, for `onnxq quantize --ranges`.

    Parts of another model, configuration, data set or version are refused by name, and so is a sample given twice.
    Merged files may be merged again.

    \b
    Example:
      onnxq merge part1.json part2.json part3.json -o ranges.json
    """
    from onnxq import pipeline
    from onnxq.report.imports import show_part

    merged = pipeline.merge_parts(parts, out=out, force=force)
    show_part(merged, out or "", view)
