"""`onnxq annotate-bits`: the bits of every pair, written into the model."""

from __future__ import annotations

from typing import Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.cli.outputs import name_beside

# Digits of a number of bits; the widest integers have 64.
_DIGITS = 3


def _parse_given(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The (pattern, bits) of each PATTERN=N. The last "=" separates them: a /regex/ may hold others."""
    out = []
    for value in values:
        pattern, _, bits = value.rpartition("=")
        if not pattern or not bits.strip().isdecimal() or len(bits) > _DIGITS:
            raise click.BadParameter(f"{value!r} is not PATTERN=N, e.g. '/encoder/*=8'")
        out.append((pattern, int(bits)))
    return tuple(out)


@click.command("annotate-bits", cls=ModelCommand, short_help="Write the bits of every Q/DQ pair into the model.")
@click.argument("model")
@click.option(
    "--bits",
    "given",
    callback=_parse_given,
    multiple=True,
    metavar="PATTERN=N",
    help="Bits of the pairs whose site or node matches (glob or /regex/); repeat it, the first match wins.",
)
@click.option("--plan", metavar="PLAN.json", help="Take the bits from this plan.")
@click.option("--output", "-o", "out", metavar="OUT", help="[default: MODEL.bits.onnx name_beside MODEL]")
@click.option("--rename", is_flag=True, help="Also name the pairs' nodes after their sites.")
@click.option(
    "--bits-attribute",
    is_flag=True,
    help="Also write the attribute `bits` on Q/DQ nodes; onnx.checker and ONNX Runtime refuse such a file.",
)
@click.option("--external-data", is_flag=True, help="Write the weights to a file of their own name_beside the model.")
@click.option("--force", is_flag=True, help="Overwrite an existing output. The input is never overwritten.")
@options.showing
@options.quiet
def run_command(
    model: str, out: str | None, force: bool, as_json: bool, verbose: bool, quiet: bool, **wanted: Any
) -> None:  # fmt: skip
    """Write the number of bits into every quantize/dequantize pair of MODEL, under the pair's name.

    Bits are read from onnxq's metadata, `bits` attributes, the integer type, Clip bounds or the values of a
    quantized weight, unless given by --bits or --plan.

    \b
    Example:
      onnxq annotate-bits model.qdq.onnx --bits '/encoder/*=4' --bits '*=8'
    """
    target = out if out is not None else str(name_beside(model, ".bits.onnx"))
    # Imported here, since --help and usage errors need none of it.
    from onnxq import report

    with report.show_progress(f"annotating {model}", model, quiet=quiet) as progress:
        from onnxq import pipeline

        done = pipeline.annotate_bits(model, out=target, force=force, progress=progress, **wanted)
    report.show_inspection(done, as_json=as_json, verbose=verbose, quiet=quiet)
