"""`onnxq bench`: models timed side by side on one engine, with their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import show_outcome
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("bench", cls=ModelCommand, takes=Command.BENCH)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@options.data
@options.as_json
@options.verbose
@options.quiet
def run_command(models: tuple[str, ...], view: View, **given: Any) -> int:
    """Build every MODEL for an engine, list its kernels by type, and time all of them side by side.

    The models are of one network: float32, float16, quantized by whatever tool; the first is the one that others are
    compared with. TensorRT's engines are timed by events of the GPU, launched kernel by kernel and as a CUDA graph;
    without a GPU, TensorRT for RTX builds ahead of time, and the kernels are listed alone.

    Exits with 1 when a model cannot be built.

    \b
    Examples:
      onnxq bench model.onnx model.q.onnx
      onnxq bench model.onnx model.fp16.onnx model.q.onnx --engine tensorrt --batch 32 --json
    """
    from onnxq import report

    with report.show_progress(f"timing {len(models)} models", *models, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.benches import find_failed_model, show_bench

        found = pipeline.bench(models, progress=progress, **given)
    return show_outcome(show_bench, found, view, find_failed_model(found))
