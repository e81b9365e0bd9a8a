"""onnxq quantize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import error_fields, say_error
from onnxq.cli.group import REFUSED, UNMET
from onnxq.cli.outputs import beside
from onnxq.errors import VerificationError

if TYPE_CHECKING:
    from onnxq.passes.journal import Promotion


@click.command("quantize", short_help="Quantize a model, check the result, say what was done.")
@click.argument("model")
@options.data
@options.wishes
@options.effort
@options.wanting
@click.option("--output", "-o", "out", metavar="OUT", help="The quantized model. [default: MODEL.q.onnx beside MODEL]")
@click.option("--plan", "plan_out", metavar="OUT.json", help="Also write the plan, for `onnxq apply`.")
@options.running
@options.library
@options.checking
@options.writing
@options.showing
@options.quiet
def command(
    model: str, out: str | None, plan_out: str | None, as_json: bool, verbose: bool, quiet: bool, strict: bool,
    no_latency: bool, force: bool, **wanted: Any,
) -> int:  # fmt: skip
    """Quantize MODEL with real samples, check the result against it, and say what was done.

    Without --data the ranges come from made-up inputs: good for trying things out, not for use.

    \b
    Examples:
      onnxq quantize model.onnx --data samples.npz
      onnxq quantize model.onnx --data images/ --config my.yaml -o small.onnx
      onnxq quantize model.onnx --data samples.npz --min-sqnr 25
      onnxq quantize model.onnx --config ort-int8-weights
    """
    target = out if out is not None else str(beside(model, ".q.onnx"))
    from onnxq import report

    wished = any(wanted[name] is not None for name in ("min_sqnr", "metric"))
    with report.watched(f"quantizing {model}", model, quiet=quiet) as progress:
        from onnxq import pipeline

        result = pipeline.quantize(
            model, out=target, plan_out=plan_out, force=force, latency=False if no_latency else None,
            progress=progress, **wanted,
        )  # fmt: skip
    unmet = _find_unmet(result.report.promotion) if wished else None
    fields = error_fields(unmet, UNMET) if unmet else None
    report.show_report(result.report, as_json=as_json, verbose=verbose, quiet=quiet, error=fields)
    if unmet is not None:
        return say_error(unmet, UNMET)
    return REFUSED if strict and result.report.refusals else 0


def _find_unmet(promotion: Promotion | None) -> VerificationError | None:
    """The error of a wish for accuracy that does not hold; None when it does."""
    if promotion is None or promotion.met:
        return None
    from onnxq.report import describe_promotion

    return VerificationError(
        "accuracy", describe_promotion(promotion), "the model is written all the same", code="Q709"
    )
