"""`onnxq plan`: a dry run."""

from __future__ import annotations

from typing import Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand


@click.command("plan", cls=ModelCommand, short_help="Show the tensors that would be quantized, how and why; a dry run.")
@click.argument("model")
@options.config_options
@options.data
@options.library
@options.plugin
@options.provider
@click.option(
    "--output", "-o", "plan_out", metavar="OUT.json", help="Write the plan, to edit it or to `onnxq apply` it."
)
@click.option("--force", is_flag=True, help="Overwrite an existing OUT.json.")
@options.showing
@options.top
@options.quiet
def run_command(
    model: str, plan_out: str | None, force: bool, as_json: bool, verbose: bool, top: int | None, quiet: bool,
    **wanted: Any,
) -> None:  # fmt: skip
    """Show the tensors of MODEL that would be quantized, how and by which rule, and the nodes that would stay float.

    A dry run: nothing is calibrated and no model is written. --json prints the plan itself.

    \b
    Examples:
      onnxq plan model.onnx
      onnxq plan model.onnx --config my.yaml -o plan.json
    """
    # Imported here, since --help and usage errors need none of it.
    from onnxq import report

    with report.show_progress(f"planning {model}", model, quiet=quiet) as progress:
        from onnxq import pipeline

        made = pipeline.make_plan(model, plan_out=plan_out, force=force, progress=progress, **wanted)
    report.show_plan(made, as_json=as_json, verbose=verbose, top=top, quiet=quiet)
