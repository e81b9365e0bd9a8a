"""`onnxq apply`: a plan carried out on its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import REFUSED, ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("apply", cls=ModelCommand, takes=Command.APPLY)
@click.argument("model")
@click.argument("plan")
@options.data
@options.make_output("The quantized model. [default: MODEL.q.onnx beside MODEL]")
@options.force
@options.strict
@options.as_json
@options.verbose
@options.quiet
def run_command(model: str, plan: str, out: str | None, strict: bool, view: View, **given: Any) -> int:
    """Carry out PLAN on MODEL: the model it was made for, or the same network exported again.

    A plan with numbers needs no data, but is checked on it when given; a plan without is calibrated on --data.
    """
    from onnxq import report

    with report.show_progress(f"applying {plan} to {model}", model, plan, quiet=view.quiet) as progress:
        from onnxq import pipeline

        result = pipeline.apply(
            model, plan, out=out or options.name_beside(model, ".q.onnx"), progress=progress, **given
        )
    report.show_report(result.report, view)
    return REFUSED if strict and result.report.refusals else 0
