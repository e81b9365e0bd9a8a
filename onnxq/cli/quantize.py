"""`onnxq quantize`: a float model in, a quantized one out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import show_outcome
from onnxq.cli.group import REFUSED, UNMET, ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("quantize", cls=ModelCommand, takes=Command.QUANTIZE)
@click.argument("model")
@options.data
@options.make_output("The quantized model. [default: MODEL.q.onnx beside MODEL]")
@options.force
@options.strict
@options.as_json
@options.verbose
@options.quiet
def run_command(model: str, out: str | None, strict: bool, view: View, **given: Any) -> int:
    """Quantize MODEL with real samples, check the result against it, and report each step.

    Without --data the ranges come from made-up inputs: good for trying things out, not for use.

    \b
    Examples:
      onnxq quantize model.onnx --data samples.npz
      onnxq quantize model.onnx --data images/ --config my.yaml -o small.onnx
      onnxq quantize model.onnx --data samples.npz --min-sqnr 25
      onnxq quantize model.onnx --config ort-int8-weights
      onnxq quantize model.onnx --config ort-dynamic
    """
    # Imported here, since --help and usage errors need none of it.
    from onnxq import report

    with report.show_progress(f"quantizing {model}", model, quiet=view.quiet) as progress:
        # Loading the engine takes about a second, which is part of the progress shown.
        from onnxq import pipeline

        result = pipeline.quantize(model, out=out or options.name_beside(model, ".q.onnx"), progress=progress, **given)
    unmet = report.find_unmet_accuracy(result.report)
    # Refusals fail the command only on request: the file that is written is right without them.
    refused = REFUSED if strict and result.report.refusals else 0
    return show_outcome(report.show_report, result.report, view, unmet, UNMET) or refused
