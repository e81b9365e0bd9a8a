"""`onnxq variants`: the files of a model that hubs hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import show_outcome
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("variants", cls=ModelCommand, takes=Command.VARIANTS)
@click.argument("model")
@options.data
@options.make_output("Gets the folder onnx with the files. [default: MODEL-variants beside MODEL]", metavar="FOLDER")
@options.force
@options.as_json
@options.quiet
def run_command(model: str, out: str | None, view: View, **given: Any) -> int:
    """Make float16, int8 and 4-bit files of MODEL, named as transformers.js looks for them, and check each.

    The table says size, time on this machine and SQNR against float. Files whose answers are lost are left out; so are
    those that cannot be made, with the reason. A JSON file beside them says how each was made.

    Exits with 1 when not one can be used.

    \b
    Examples:
      onnxq variants model.onnx --data samples.npz -o my-model
      onnxq variants model.onnx --only q8,q4f16
      onnxq variants model.onnx --data samples.npz --metric evaluate.py:accuracy --max-drop 1%
    """
    from onnxq import report

    with report.show_progress(f"making variants of {model}", model, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.variants import find_no_variant, show_variants

        found = pipeline.variants(model, out=out or options.name_beside(model, "-variants"), progress=progress, **given)
    return show_outcome(show_variants, found, view, find_no_variant(found))
