"""`onnxq calibrate`: the ranges of one shard of the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("calibrate", cls=ModelCommand, takes=Command.QUANTIZE)
@click.argument("model")
@options.data
@click.option("--shard", default="1/1", metavar="I/N", help="Run the I-th of N shards of the samples. [default: 1/1]")
@options.make_output("The part. [default: MODEL.part.json beside MODEL]", metavar="PART.json")
@options.force
@options.as_json
@options.quiet
def run_command(model: str, out: str | None, view: View, **given: Any) -> None:
    """Observe MODEL's activations on a shard of the samples, for batch systems without a common scheduler.

    Every job gets all samples and the same options, which are those of `onnxq quantize`, and runs its shard alone.
    `onnxq merge` joins the parts; `onnxq quantize --ranges` takes them in place of runs of its own.

    \b
    Examples:
      onnxq calibrate model.onnx --data samples/ --shard 1/8 -o part1.json
      onnxq merge part*.json -o ranges.json
      onnxq quantize model.onnx --data samples/ --ranges ranges.json
    """
    from onnxq import report

    with report.show_progress(f"calibrating {model}", model, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.imports import show_part

        target = out or options.name_beside(model, ".part.json")
        part = pipeline.calibrate_part(model, out=target, progress=progress, **given)
    show_part(part, str(target), view)
