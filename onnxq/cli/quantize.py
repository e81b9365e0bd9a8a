"""`onnxq quantize`: a float model in, a quantized one out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import error_fields, print_error
from onnxq.cli.group import REFUSED, UNMET, ModelCommand
from onnxq.cli.outputs import name_beside
from onnxq.errors import VerificationError

if TYPE_CHECKING:
    from onnxq.passes.journal import Promotion


@click.command("quantize", cls=ModelCommand, short_help="Quantize a model, check the result, report each step.")
@click.argument("model")
@options.data
@options.config_options
@options.effort
@options.accuracy_options
@click.option(
    "--output", "-o", "out", metavar="OUT", help="The quantized model. [default: MODEL.q.onnx name_beside MODEL]"
)
@click.option("--plan", "plan_out", metavar="OUT.json", help="Also write the plan, for `onnxq apply`.")
@options.running
@options.library
@options.plugin
@options.provider
@options.checking
@options.writing
@options.showing
@options.quiet
def run_command(
    model: str, out: str | None, plan_out: str | None, as_json: bool, verbose: bool, quiet: bool, strict: bool,
    no_latency: bool, force: bool, **wanted: Any,
) -> int:  # fmt: skip
    """Quantize MODEL with real samples, check the result against it, and report each step.

    Without --data the ranges come from made-up inputs: good for trying things out, not for use.

    \b
    Examples:
      onnxq quantize model.onnx --data samples.npz
      onnxq quantize model.onnx --data images/ --config my.yaml -o small.onnx
      onnxq quantize model.onnx --data samples.npz --min-sqnr 25
      onnxq quantize model.onnx --config ort-int8-weights
    """
    target = out if out is not None else str(name_beside(model, ".q.onnx"))
    from onnxq import report

    # Promotion also runs unasked; only a requirement of the user's can fail the command.
    wished = any(wanted[name] is not None for name in ("min_sqnr", "metric"))
    with report.show_progress(f"quantizing {model}", model, quiet=quiet) as progress:
        # Loading the engine takes about a second, which is part of the progress shown.
        from onnxq import pipeline

        # latency None: as the configuration says.
        result = pipeline.quantize(
            model, out=target, plan_out=plan_out, force=force, latency=False if no_latency else None,
            progress=progress, **wanted,
        )  # fmt: skip
    unmet = _find_unmet(result.report.promotion) if wished else None
    fields = error_fields(unmet, UNMET) if unmet else None
    report.show_report(result.report, as_json=as_json, verbose=verbose, quiet=quiet, error=fields)
    if unmet is not None:
        return print_error(unmet, UNMET)
    # Refusals fail the command only on request: the file that is written is right without them.
    return REFUSED if strict and result.report.refusals else 0


def _find_unmet(promotion: Promotion | None) -> VerificationError | None:
    """The error of a required accuracy that is not reached; None where it is."""
    if promotion is None or promotion.met:
        return None
    from onnxq.report import describe_promotion

    return VerificationError(
        "accuracy", describe_promotion(promotion), "the model is written all the same", code="Q709"
    )
