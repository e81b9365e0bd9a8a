"""`onnxq inspect`: the pairs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("inspect", cls=ModelCommand)
@click.argument("model")
@options.as_json
@options.verbose
@options.top
@options.quiet
def run_command(model: str, view: View) -> None:
    """List every quantize/dequantize pair of MODEL: its site, bits and scale, and the origin of the bits.

    The model may come from any tool.
    """
    from onnxq import report

    with report.show_progress(f"inspecting {model}", model, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.pairs import show_inspection

        found = pipeline.inspect(model, progress=progress)
    show_inspection(found, view)
