"""`onnxq import-calibration`: a TensorRT calibration cache turned into a plan."""

from __future__ import annotations

from typing import Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.files import guard_outputs


@click.command(
    "import-calibration", cls=ModelCommand, short_help="Turn a TensorRT calibration cache into a plan with its scales."
)
@click.argument("cache")
@click.option("--model", required=True, metavar="MODEL", help="The ONNX file that TensorRT was calibrated with.")
@click.option("--target", type=click.Choice(["trt", "ort"]), help="The engine that will run the result. [default: trt]")
@click.option("--config", metavar="PRESET|FILE", help="A preset's name or a YAML file with symmetric int8 activations.")
@options.data
@options.running
@options.library
@options.provider
@click.option("--allow-missing", is_flag=True, help="Leave float whatever reads a tensor the cache has no scale for.")
@click.option("--output", "-o", "plan_out", metavar="PLAN.json", help="Write the plan, for `onnxq apply`.")
@click.option("--apply", "out", metavar="OUT.onnx", help="Carry the plan out at once: the Q/DQ model.")
@click.option("--force", is_flag=True, help="Overwrite existing output files. The input is never overwritten.")
@options.showing
@options.quiet
def run_command(
    cache: str, model: str, data: str | None, plan_out: str | None, out: str | None, force: bool, as_json: bool,
    verbose: bool, quiet: bool, **wanted: Any,
) -> None:  # fmt: skip
    """Turn CACHE, the text file of a TensorRT INT8 calibrator, into a plan with its scales.

    For the move from TensorRT 10's implicit INT8 to the explicit Q/DQ of TensorRT 11. Activations take the scales of
    the cache bit for bit, weights get theirs from their values. Lines without a tensor and tensors without a line are
    listed; --data calibrates the latter.

    \b
    Examples:
      onnxq import-calibration model.cache --model model.onnx --apply model.q.onnx
      onnxq import-calibration model.cache --model model.onnx --data samples.npz -o plan.json
    """
    from onnxq import report

    applied = None
    # Inputs and both outputs are checked before anything is written, since the plan is written first.
    with (
        guard_outputs(model, plan_out, out, force=force),
        report.show_progress(f"importing {cache}", model, quiet=quiet) as progress,
    ):
        from onnxq import pipeline

        found = pipeline.import_calibration(
            cache, model, data, plan_out=plan_out, force=force, progress=progress, **wanted
        )  # fmt: skip
        if out is not None:
            # The options of the import, so that both steps read the same samples.
            same = {key: wanted[key] for key in ("samples", "seed", "batch", "memory_limit", "ort_library", "provider")}
            # A configuration that was not given follows the plan's target.
            config = wanted["config"] or f"{found.plan.target}-int8"
            applied = pipeline.apply(
                model, found.plan, data, config, latency=False, out=out, force=force, progress=progress, **same
            ).report
    report.show_import(found, applied=applied, as_json=as_json, verbose=verbose, quiet=quiet)
    if applied is not None and not as_json:
        report.show_report(applied, verbose=verbose, quiet=quiet)
