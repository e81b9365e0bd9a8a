"""`onnxq profile`: the cost of each quantized site at the outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("profile", cls=ModelCommand, takes=Command.PROFILE)
@click.argument("model", metavar="FLOAT")
@click.argument("quantized", metavar="[QUANT]", required=False)
@click.option("--plan", metavar="PLAN.json", help="A plan with its numbers, in the place of QUANT.")
@options.data
@options.as_json
@options.verbose
@options.top
@options.quiet
def run_command(model: str, quantized: str | None, view: View, **given: Any) -> None:
    """Switch quantized sites on and off, and measure their cost at the outputs of FLOAT, worst first.

    QUANT is a Q/DQ model made from FLOAT, by any tool. Without it, and without --plan, FLOAT is quantized in memory
    first. Each group is measured isolated (only it quantized) and left out (all but it), on 8 samples or --samples.

    \b
    Examples:
      onnxq profile model.onnx --data samples.npz
      onnxq profile model.onnx model.q.onnx --data samples.npz --by node
      onnxq profile model.onnx --plan plan.json --data samples.npz --json
    """
    from onnxq import report

    title = f"profiling {quantized or model}"
    with report.show_progress(title, model, quantized, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.profiles import show_profile

        found = pipeline.profile_model(model, quantized, progress=progress, **given)
    show_profile(found, view)
