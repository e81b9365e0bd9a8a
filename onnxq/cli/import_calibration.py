"""`onnxq import-calibration`: a TensorRT calibration cache turned into a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.config import Command
from onnxq.files import guard_outputs

if TYPE_CHECKING:
    from onnxq.report import View

# The options that both steps take, so that they read the same samples.
_SHARED = ("samples", "seed", "batch", "memory_limit", "ort_library", "provider")


@click.command("import-calibration", cls=ModelCommand, takes=Command.IMPORT)
@click.argument("cache")
@click.option("--model", required=True, metavar="MODEL", help="The ONNX file that TensorRT was calibrated with.")
@options.data
@options.make_output("Write the plan, for `onnxq apply`.", metavar="PLAN.json")
@click.option("--apply", "applied", metavar="OUT.onnx", help="Carry the plan out at once: the Q/DQ model.")
@options.force
@options.as_json
@options.verbose
@options.quiet
def run_command(
    cache: str, model: str, data: str | None, config: str | None, overrides: dict[str, Any], out: str | None,
    applied: str | None, force: bool, view: View,
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

    done = None
    # Inputs and both outputs are checked before anything is written, since the plan is written first.
    with (
        guard_outputs(model, out, applied, force=force),
        report.show_progress(f"importing {cache}", model, quiet=view.quiet) as progress,
    ):
        from onnxq import pipeline
        from onnxq.report.imports import show_import

        how: Any = {"force": force, "progress": progress}
        found = pipeline.import_calibration(cache, model, data, config, overrides=overrides, out=out, **how)
        if applied is not None:
            same = {key: overrides[key] for key in _SHARED if key in overrides} | {"latency": False}
            # A configuration that was not given follows the plan's target.
            config = config or f"{found.plan.target}-int8"
            done = pipeline.apply(model, found.plan, data, config, overrides=same, out=applied, **how).report
    show_import(found, view, applied=done)
    if done is not None and not view.as_json:
        report.show_report(done, view)
