"""`onnxq annotate-bits`: the bits of every pair, written into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View

# Digits of a number of bits; the widest integers have 64.
_DIGITS = 3


def _parse_bits(text: str) -> tuple[str, int]:
    """The (pattern, bits) of PATTERN=N. The last "=" separates them: a /regex/ may hold others."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.strip().isdecimal() or len(bits) > _DIGITS:
        raise ValueError(f"{text!r} is not PATTERN=N, e.g. '/encoder/*=8'")
    return pattern, int(bits)


@click.command("annotate-bits", cls=ModelCommand, takes=Command.ANNOTATE)
@click.argument("model")
@click.option(
    "--bits",
    "given",
    type=options.Parsed(_parse_bits),
    multiple=True,
    metavar="PATTERN=N",
    help="Bits of the pairs whose site or node matches (glob or /regex/); repeat it, the first match wins.",
)
@click.option("--plan", metavar="PLAN.json", help="Take the bits from this plan.")
@options.make_output("[default: MODEL.bits.onnx beside MODEL]")
@options.force
@options.as_json
@options.verbose
@options.quiet
def run_command(model: str, out: str | None, view: View, **wanted: Any) -> None:
    """Write the number of bits into every quantize/dequantize pair of MODEL, under the pair's name.

    Bits are read from onnxq's metadata, `bits` attributes, the integer type, Clip bounds or the values of a
    quantized weight, unless given by --bits or --plan.

    \b
    Example:
      onnxq annotate-bits model.qdq.onnx --bits '/encoder/*=4' --bits '*=8'
    """
    from onnxq import report

    with report.show_progress(f"annotating {model}", model, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.pairs import show_inspection

        target = out or options.name_beside(model, ".bits.onnx")
        done = pipeline.annotate_bits(model, out=target, progress=progress, **wanted)
    show_inspection(done, view)
