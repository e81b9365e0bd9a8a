"""`onnxq bench`: models timed side by side on one engine, with their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import error_fields, print_error
from onnxq.errors import VerificationError

if TYPE_CHECKING:
    from onnxq.engines.bench.model import Bench


@click.command("bench", short_help="Time models side by side on an engine, and count their kernels.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--engine",
    type=click.Choice(["tensorrt-rtx", "tensorrt", "ort"]),
    default=None,
    help="tensorrt and tensorrt-rtx on the GPU of this machine, ort on the CPU or --provider. "
    "[default: the one that the first plan in the models is for]",
)
@click.option(
    "--compute-capability",
    metavar="8.6",
    help="GPU to build for, tensorrt-rtx only; kernels are counted and nothing is timed.",
)
@click.option("--data", metavar="DATA", help="Samples, as for `quantize`; the first is timed. [default: made up]")
@click.option(
    "--config", metavar="PRESET|FILE", help="A YAML file for its `data` and `runtime` sections: images, libraries."
)
@click.option(
    "--shapes",
    metavar="INPUT:SIZES",
    multiple=True,
    help="Sizes of an input of no fixed size, e.g. x:1x3x224x224; repeatable.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Samples in a run."
)
@click.option(
    "--threads", type=click.IntRange(min=0), metavar="N", default=1, show_default=True,
    help="Threads of ONNX Runtime; 0: all.",
)  # fmt: skip
@click.option(
    "--seconds",
    type=options.FiniteFloat(min=0, min_open=True),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Time to spend on timing, in all.",
)
@click.option(
    "--timeout",
    type=options.FiniteFloat(min=0, min_open=True),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="Time a build may take.",
)
@options.library
@options.plugin
@options.provider
@options.showing
@options.quiet
def run_command(
    models: tuple[str, ...], shapes: tuple[str, ...], as_json: bool, verbose: bool, quiet: bool, **wanted: Any
) -> int:  # fmt: skip
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

    with report.show_progress(f"timing {len(models)} models", *models, quiet=quiet) as progress:
        from onnxq import pipeline
        from onnxq.engines.builder.shapes import parse_shapes

        found = pipeline.bench(models, shapes=parse_shapes(shapes), progress=progress, **wanted)
    failure = _find_failure(found)
    report.show_bench(
        found, as_json=as_json, verbose=verbose, quiet=quiet, error=error_fields(failure) if failure else None
    )
    return print_error(failure) if failure else 0


def _find_failure(found: Bench) -> VerificationError | None:
    """The error of the first model that was not built, or not timed where others were; None without one."""
    for one in found.failed:
        if one.proof is not None and not one.built:
            build = one.proof.build
            return VerificationError(one.name, f"{build.state}: {build.reason}", "see `onnxq prove`", code="Q705")
        return VerificationError(one.name, f"was not timed: {one.reason}", "see the cause", code="Q710")
    return None
