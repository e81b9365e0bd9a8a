"""`onnxq diff`: a quantized model against its float one, and engines against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import show_outcome
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("diff", cls=ModelCommand, takes=Command.DIFF)
@click.argument("model", metavar="FLOAT")
@click.argument("quantized", metavar="QUANT")
@options.data
@options.make_output(
    "Write results.json and inputs.json (Polygraphy's), diff.json, pieces.", "--save", metavar="FOLDER"
)
@options.force
@options.as_json
@options.verbose
@options.top
@options.quiet
def run_command(model: str, quantized: str, view: View, **given: Any) -> int:
    """Run FLOAT and QUANT on samples and say how far they are apart: ONNX Runtime off, on, and TensorRT.

    Exits with 1 when a tolerance is not met, or when an engine that must run does not: one named by --engines, else the
    one that QUANT was made for, TensorRT only where it is installed and has a GPU.

    \b
    Examples:
      onnxq diff model.onnx model.q.onnx --data samples.npz --min-sqnr 20
      onnxq diff model.onnx model.q.onnx --data samples.npz --layers --bisect --save out
      onnxq diff model.onnx model.q.onnx --load from-the-gpu-machine/results.json
    """
    from onnxq import report

    title = f"comparing {quantized} with {model}"
    with report.show_progress(title, model, quantized, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.diffs import find_unmet_tolerance, show_difference

        found = pipeline.diff(model, quantized, progress=progress, **given)
    # After the comparison: the report is shown whether the tolerances hold or not.
    return show_outcome(show_difference, found, view, find_unmet_tolerance(found))
