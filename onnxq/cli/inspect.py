"""onnxq inspect."""

from __future__ import annotations

import click

from onnxq.cli import options


@click.command("inspect", short_help="List the Q/DQ pairs of any model, with their bits.")
@click.argument("model")
@options.showing
def command(model: str, as_json: bool, verbose: bool) -> None:
    """List every quantize/dequantize pair of MODEL: its site, bits and scale, and what the bits were read from.

    The model may come from any tool.
    """
    from onnxq import pipeline, report

    report.show_inspection(pipeline.inspect(model), as_json=as_json, verbose=verbose)
