"""`onnxq profile`: the cost of each quantized site at the outputs."""

from __future__ import annotations

from typing import Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand

# Groups of sites that are switched together.
_KINDS = ("node", "segment", "site")


def _parse_groupings(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The groupings of a list with commas, each once; all where none is given."""
    names = tuple(dict.fromkeys(part.strip() for part in (value or "").split(",") if part.strip()))
    for name in names:
        if name not in _KINDS:
            raise click.BadParameter(f"{name!r} is no grouping; they are {', '.join(_KINDS)}")
    return names or _KINDS


@click.command("profile", cls=ModelCommand, short_help="Measure the cost of each quantized site at the outputs.")
@click.argument("model", metavar="FLOAT")
@click.argument("quantized", metavar="[QUANT]", required=False)
@click.option("--plan", metavar="PLAN.json", help="A plan with its numbers, in the place of QUANT.")
@options.data
@options.library
@options.provider
@click.option(
    "--target",
    type=click.Choice(["ort", "trt"]),
    help="Without QUANT and plan: the engine to quantize for. [default: ort]",
)
@click.option("--config", metavar="PRESET|FILE", help="The same: a preset or YAML file; also says how images are read.")
@click.option(
    "--by",
    metavar="node,segment,site",
    callback=_parse_groupings,
    help="Sites to switch together: all that a node reads, neighbouring nodes, each site. [default: all three]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads of ONNX Runtime; 0: all.",
)
@options.showing
@options.top
@options.quiet
def run_command(
    model: str, quantized: str | None, as_json: bool, verbose: bool, top: int | None, quiet: bool, **wanted: Any
) -> None:
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

    with report.show_progress(f"profiling {quantized or model}", model, quantized, quiet=quiet) as progress:
        from onnxq import pipeline

        found = pipeline.profile_model(model, quantized, progress=progress, **wanted)
    report.show_profile(found, as_json=as_json, verbose=verbose, top=top, quiet=quiet)
