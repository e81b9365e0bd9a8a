"""`onnxq apply`: a plan carried out on its model."""

from __future__ import annotations

from typing import Any

import click

from onnxq.cli import options
from onnxq.cli.group import REFUSED, ModelCommand
from onnxq.cli.outputs import name_beside


@click.command("apply", cls=ModelCommand, short_help="Carry out a plan on its model or on a re-export of it.")
@click.argument("model")
@click.argument("plan")
@options.data
@click.option(
    "--output", "-o", "out", metavar="OUT", help="The quantized model. [default: MODEL.q.onnx name_beside MODEL]"
)
@click.option("--plan", "plan_out", metavar="OUT.json", help="Also write the plan with its numbers.")
@click.option("--new-weights", is_flag=True, help="The weights were trained further: compute their scales again.")
@options.running
@options.library
@options.provider
@options.checking
@options.writing
@options.showing
@options.quiet
def run_command(
    model: str, plan: str, out: str | None, plan_out: str | None, as_json: bool, verbose: bool, quiet: bool,
    strict: bool, no_latency: bool, force: bool, **wanted: Any,
) -> int:  # fmt: skip
    """Carry out PLAN on MODEL: the model it was made for, or the same network exported again.

    A plan with numbers needs no data, but is checked on it when given; a plan without is calibrated on --data.
    """
    target = out if out is not None else str(name_beside(model, ".q.onnx"))
    from onnxq import report

    with report.show_progress(f"applying {plan} to {model}", model, plan, quiet=quiet) as progress:
        # Loading the engine takes about a second, which is part of the progress shown.
        from onnxq import pipeline

        # latency None: as the configuration says.
        result = pipeline.apply(
            model, plan, out=target, plan_out=plan_out, force=force, latency=False if no_latency else None,
            progress=progress, **wanted,
        )  # fmt: skip
    report.show_report(result.report, as_json=as_json, verbose=verbose, quiet=quiet)
    # Refusals fail the command only on request: the file that is written is right without them.
    return REFUSED if strict and result.report.refusals else 0
