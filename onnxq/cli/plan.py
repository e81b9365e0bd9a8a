"""`onnxq plan`: a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("plan", cls=ModelCommand, takes=Command.PLAN)
@click.argument("model")
@options.data
@options.make_output("Write the plan, to edit it or to `onnxq apply` it.", metavar="OUT.json")
@options.force
@options.as_json
@options.verbose
@options.top
@options.quiet
def run_command(model: str, view: View, **given: Any) -> None:
    """Show the tensors of MODEL that would be quantized, how and by which rule, and the nodes that would stay float.

    A dry run: nothing is calibrated and no model is written. --json prints the plan itself.

    \b
    Examples:
      onnxq plan model.onnx
      onnxq plan model.onnx --config my.yaml -o plan.json
    """
    from onnxq import report

    with report.show_progress(f"planning {model}", model, quiet=view.quiet) as progress:
        from onnxq import pipeline

        made = pipeline.make_plan(model, progress=progress, **given)
    report.show_plan(made, view)
