"""`onnxq inspect`: the pairs of a model."""

from __future__ import annotations

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand


@click.command("inspect", cls=ModelCommand, short_help="List the Q/DQ pairs of any model, with their bits.")
@click.argument("model")
@options.showing
@options.top
@options.quiet
def run_command(model: str, as_json: bool, verbose: bool, top: int | None, quiet: bool) -> None:
    """List every quantize/dequantize pair of MODEL: its site, bits and scale, and the origin of the bits.

    The model may come from any tool.
    """
    # Imported here, since --help and usage errors need none of it.
    from onnxq import report

    with report.show_progress(f"inspecting {model}", model, quiet=quiet) as progress:
        from onnxq import pipeline

        found = pipeline.inspect(model, progress=progress)
    report.show_inspection(found, as_json=as_json, verbose=verbose, top=top, quiet=quiet)
